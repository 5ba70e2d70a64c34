"""Fixtures for every layer: no toggle of the shell reaches a test, no outcome outlives one."""

import os
import sys
from collections.abc import Iterator

import pytest

from vllm_commext import status
from vllm_commext.plugin import CONNECTOR_NAME
from vllm_commext.settings import PREFIX


@pytest.fixture(autouse=True)
def _no_toggles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    status.clear()
    yield
    status.clear()
    _forget_connector()


def _forget_connector() -> None:
    """Take what a test has registered out of vLLM again, where vLLM was imported at all."""
    factory = sys.modules.get("vllm.distributed.kv_transfer.kv_connector.factory")
    if factory is not None:
        factory.KVConnectorFactory._registry.pop(CONNECTOR_NAME, None)
