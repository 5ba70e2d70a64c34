"""Descriptors, and the NIXL that takes them."""

import numpy as np
import pytest

from tests.kit.descriptors import expand_rows
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import strided_row
from vllm_commext.nixl.transport import agent


def test_neighbours_as_one_row() -> None:
    row = strided_row(address=(1 << 63) + 5, num_bytes=8, count=3, device_id=2)
    assert (row.shape, row.dtype) == ((1, 5), np.uint64)
    assert [tuple(map(int, one)) for one in expand_rows(row)] == [
        ((1 << 63) + 5 + 8 * number, 8, 2) for number in range(3)
    ]


@pytest.mark.parametrize("version", ["1.4.2", "0.9"])
def test_an_older_nixl_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(agent.importlib.metadata, "version", lambda _: version)
    words = f"expected NIXL 1.5 or newer, got {version}: `pip install nixl==1.5.1`"
    with pytest.raises(UnsupportedError, match=words):
        agent.load_nixl()
