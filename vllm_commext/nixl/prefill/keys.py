"""Prefills by the keys that a router gives them, by which it has them released.

Of 128 random bits, a key proves who asks: the router alone knows it beside this engine. It can be
told that nobody will read a prefill when that is kept, still computed, or has not come in yet, as
where a client leaves while its request is on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from vllm_commext.nixl.prefill.prefill_state import PrefillPhase, PrefillState
from vllm_commext.nixl.wire.params import as_key

MAX_RELEASES = 1024
"""Keys that one request may name."""
MAX_EARLY = 4096
"""Keys remembered whose prefills have not come in."""


def prefill_key_of(params: Mapping[str, Any] | None) -> str:
    """The key that a router gives a prefill, "" for none."""
    return as_key((params or {}).get("prefill_key"))


def releases_of(params: Mapping[str, Any] | None) -> list[str]:
    """The keys of prefills that a router has released; "" for each that is none."""
    named = (params or {}).get("release")
    return [as_key(one) for one in named[:MAX_RELEASES]] if isinstance(named, list) else []


class PrefillKeys:
    """Keys of the prefills that are computed or kept."""

    def __init__(self) -> None:
        self._states: dict[str, PrefillState] = {}
        self._early: OrderedDict[str, None] = OrderedDict()

    def add(self, key: str, state: PrefillState) -> None:
        """A prefill has come in."""
        if key in self._early:
            del self._early[key]
            state.move(PrefillPhase.UNWANTED)
        elif key and key not in self._states:
            self._states[key], state.key = state, key

    def release(self, key: str) -> PrefillState | None:
        """Nobody will read a prefill, which is returned; None where none with that key is
        known."""
        state = self._states.get(key)
        if state is not None:
            self.forget(state)
        elif key:
            self._early[key] = None
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
        return state

    def forget(self, state: PrefillState) -> None:
        """A prefill is neither computed nor kept any more."""
        self._states.pop(state.key, None)
        state.key = ""
