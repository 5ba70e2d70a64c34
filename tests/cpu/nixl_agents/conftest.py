"""Engines for the tests of this folder; without NIXL there is nothing to collect.

UCX reads its settings when NIXL is first imported, so they are set here: TCP over loopback, where a
read is answered by the peer and stops with it."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Without hooks, see ``tests/kit/servers.py``.
os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_MEM_MMAP_HOOK_MODE="none")

if importlib.util.find_spec("nixl") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Any]]:
    """Makes engines and closes them at the end, the youngest first."""
    from tests.cpu.nixl_agents.harness import Engine  # imports NIXL

    made: list[Any] = []

    def make(engine_id: str, **settings: Any) -> Any:
        made.append(Engine(engine_id, **settings))
        return made[-1]

    yield make
    for engine in reversed(made):
        engine.close()
