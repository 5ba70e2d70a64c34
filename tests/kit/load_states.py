"""A request that is to be loaded, as a decode engine's scheduler side has it."""

from types import SimpleNamespace
from typing import Any

from vllm_commext.nixl.decode.load_state import LoadPhase, LoadState, Source


def known(name: str, **values: Any) -> LoadState:
    request: Any = SimpleNamespace(request_id=name)
    return LoadState(request, Source.GIVEN, LoadPhase.KNOWN, **values)


def begin_load(side: Any, name: str, **values: Any) -> None:
    """A scheduler side has its workers load one."""
    state = side.prompts._states[name] = known(name, **values)
    side.prompts.quarantine.begin(state)
