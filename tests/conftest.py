"""Fixtures for every layer: no toggle of the shell reaches a test, no outcome outlives one."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kit.forked import fork_servers, forking
from vllm_commext import status
from vllm_commext.plugin import CONNECTOR_NAME
from vllm_commext.settings import PREFIX


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a run share their fork servers; tests that `make test` has no time for have
    a mark; no example of a property test fails for taking long on a busy machine."""
    stack = ExitStack()
    stack.enter_context(fork_servers())
    config.add_cleanup(stack.close)
    config.addinivalue_line("markers", "long: only with COMMEXT_TEST_LONG=1; `make long` sets it")
    if importlib.util.find_spec("hypothesis") is not None:  # the GPU layer does without
        from hypothesis import HealthCheck, settings

        patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("patient", patient)
        settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip long tests unless they are asked for."""
    if os.environ.get("COMMEXT_TEST_LONG"):
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="long; COMMEXT_TEST_LONG=1 runs it"))


@pytest.fixture(scope="session")
def forked_servers() -> Iterator[None]:
    """Real servers start without importing vLLM anew."""
    with forking():
        yield


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
