"""Fixtures for every layer: no toggle of the shell reaches a test, no outcome outlives one."""

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.forked import fork_servers, forking, worker_spec
from vllm_commext import status
from vllm_commext.plugin import CONNECTOR_NAME
from vllm_commext.settings import PREFIX


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a run share their fork servers; tests that `make test` has no time for have
    a mark, and property tests fewer examples there; none of those fails for taking long on a busy
    machine."""
    if set(config.getoption("tx", ())) == {"popen"}:
        config.option.tx = [worker_spec()] * len(config.option.tx)
    stack = ExitStack()
    stack.enter_context(fork_servers())
    config.add_cleanup(stack.close)
    config.add_cleanup(gc.unfreeze)
    config.addinivalue_line("markers", "long: only with COMMEXT_TEST_LONG=1; `make long` sets it")
    if importlib.util.find_spec("hypothesis") is not None:  # the GPU layer does without
        from hypothesis import HealthCheck, settings

        many = 400 if os.environ.get("COMMEXT_TEST_LONG") else 30
        patient = settings(
            deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=many
        )
        settings.register_profile("patient", patient)
        settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import stays until the end, so that no collection of garbage has to look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# Those that take longest, by the clock of a `make test`; the last ones to begin take seconds.
LONGEST = (
    "cpu/test_resume.py",
    "cpu/test_topologies.py",
    "chaos/test_chaos.py",
    "cpu/test_requests.py",
    "cpu/test_first_token.py",
    "cpu/test_shm_queue.py",
    "cpu/nixl_agents/test_peer_life.py",
    "cpu/test_resets.py",
    "cpu/nixl_agents/test_peer_processes.py",
    "cpu/nixl_agents/test_leases_kept_alive.py",
    "cpu/test_lost_prefills.py",
    "cpu/nixl_agents/test_streams.py",
    "cpu/nixl_agents/test_remote_requests.py",
    "cpu/nixl_agents/test_mapped.py",
    "cpu/nixl_agents/test_clusters.py",
    "cpu/nixl_agents/test_restarts.py",
    "cpu/nixl_agents/test_reads.py",
    "cpu/nixl_agents/test_ucx_log.py",
    "cpu/nixl_agents/test_fence.py",
    "cpu/nixl_agents/test_before_requests.py",
    "cpu/nixl_agents/test_faults.py",
    "chaos/test_fuzz.py",
)


def _place(item: pytest.Item) -> int:
    """A file that takes long starts early, so that no worker goes on alone at the end."""
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONGEST.index(path) if path in LONGEST else len(LONGEST)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; skip long tests unless they are asked for."""
    items.sort(key=_place)
    if os.environ.get("COMMEXT_TEST_LONG"):
        return
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="long; COMMEXT_TEST_LONG=1 runs it"))


@pytest.fixture(scope="session")
def forked_servers() -> Iterator[None]:
    """Real servers start without importing vLLM anew; skip where they cannot run."""
    needed = ("vllm", "nixl", "httpx", "aiohttp")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
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


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The connector's records, each once: vLLM, where another test imports it, stops them on their
    way to the root logger, which is where ``caplog`` listens."""
    logger = logging.getLogger("vllm.commext.nixl")
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = before


def _forget_connector() -> None:
    """Take what a test has registered out of vLLM again, where vLLM was imported at all."""
    factory = sys.modules.get("vllm.distributed.kv_transfer.kv_connector.factory")
    if factory is not None:
        factory.KVConnectorFactory._registry.pop(CONNECTOR_NAME, None)
