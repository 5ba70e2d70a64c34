"""How many descriptors a read needs for each of NIXL's worker threads to get a share."""

from typing import Any

import pytest

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.sweep import num_descriptors


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4 * 1024),
        ({"backend_params": {"num_threads": "1"}}, 1024),
        ({"backend_params": {"num_threads": "0"}}, 0),
        ({"backends": ("GDS",)}, 0),
        ({"backend_params": {"num_threads": "3", "split_batch_size": "10"}}, 30),
        ({"backend_params": {"num_threads": "2", "split_batch_size": "0"}}, 2),
    ],
)
def test_every_worker_thread_gets_a_share(settings: dict[str, Any], expected: int) -> None:
    assert num_descriptors(ConnectorConfig("here", 5600, **settings)) == expected
