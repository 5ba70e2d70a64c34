"""Engines for the tests of this folder; without NIXL there is nothing to collect.

UCX reads its settings when NIXL is first imported, so they are set here: TCP over loopback, where a
read is answered by the peer and stops with it.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo")

# Where the planner's reference lies.
sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "nixl"))

if importlib.util.find_spec("nixl") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Tests are no package, so the modules that they share are given their names here.
    for _name in ("harness", "ranks", "simulation", "streams"):
        _spec = importlib.util.spec_from_file_location(
            f"nixl_agents_{_name}", Path(__file__).with_name(f"{_name}.py")
        )
        assert _spec is not None
        assert _spec.loader is not None
        _module: Any = importlib.util.module_from_spec(_spec)
        sys.modules[_spec.name] = _module
        _spec.loader.exec_module(_module)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Any]]:
    """Makes engines and closes them at the end, the youngest first."""
    made: list[Any] = []

    def make(engine_id: str, **settings: Any) -> Any:
        made.append(sys.modules["nixl_agents_harness"].Engine(engine_id, **settings))
        return made[-1]

    yield make
    for engine in reversed(made):
        engine.close()


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The connector's records, each once, whatever vLLM has done to its loggers."""
    logger = logging.getLogger("vllm.commext.nixl")
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = before
