"""The contract layer: an installed vLLM, no model. Without vLLM there is nothing to collect."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.contract.scheduler_engine import Engine

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


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
