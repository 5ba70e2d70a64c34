"""Fixtures for every layer: no toggle of the shell reaches a test, no outcome outlives one."""

import os
from collections.abc import Iterator

import pytest

from vllm_commext import status
from vllm_commext.settings import PREFIX


@pytest.fixture(autouse=True)
def _no_toggles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    status.clear()
    yield
    status.clear()
