"""The contract layer: an installed vLLM, no model. Without vLLM there is nothing to collect."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.contract.arrivals import Channel
    from tests.contract.scheduled_core import Core
    from tests.contract.scheduler_engine import Engine

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
TIMEOUT_SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process that imports vLLM takes seconds, and much longer on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(params=[False, True], ids=["one step at a time", "async scheduling"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """An engine schedules a step while the one before is under way."""
    return request.param


@pytest.fixture(params=["fail", "recompute"])
def policy(request: pytest.FixtureRequest) -> str:
    """Of vLLM's for loads that fail."""
    return request.param


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines for the scheduler side's tests, and closes them."""
    from tests.contract.scheduler_engine import Engine

    made: list[Engine] = []

    def make(role: str, **settings: Any) -> Engine:
        made.append(Engine(role, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.connector.shutdown()


@pytest.fixture
def channel() -> Iterator[Channel]:
    """A prefill engine's side channel, closed afterwards."""
    from tests.contract.arrivals import Channel

    made = Channel()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.kit.tiny_model import FEW_LAYERS, write_tiny_model

    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "llama", num_layers=FEW_LAYERS["llama"]
    )


@pytest.fixture
def restored_step() -> Iterator[None]:
    """The engine's step is as it was afterwards."""
    from vllm_commext.compat import engine_wait, monkey_patch, resets

    yield
    for symbol in (engine_wait.SYMBOL, resets.CACHE, resets.CALL, resets.ADAPTER):
        if monkey_patch.is_patched(symbol):
            monkey_patch.restore(symbol)


@pytest.fixture
def make_core(folder: Path, restored_step: None) -> Iterator[Callable[..., Core]]:
    """Makes engines of that model, and closes them."""
    from tests.contract.scheduled_core import Core

    made: list[Core] = []

    def make(role: str = "", **settings: Any) -> Core:
        made.append(Core(folder, role, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
