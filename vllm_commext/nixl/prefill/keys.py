"""Prefills by the keys that a router gives them, by which it has them released.

Of 128 random bits, a key proves who asks: the router alone knows it beside this engine. It can be
told that nobody will read a prefill when that is kept, still computed, or has not come in yet, as
where a client leaves while its request is on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

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
    """Keys of the prefills that are computed or kept.

    Attributes:
        unwanted: requests under way that nobody will read.
    """

    def __init__(self) -> None:
        self.unwanted: set[str] = set()
        self._requests: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._early: OrderedDict[str, None] = OrderedDict()

    def add(self, key: str, request_id: str) -> None:
        """A prefill has come in."""
        if key in self._early:
            del self._early[key]
            self.unwanted.add(request_id)
        elif key and key not in self._requests:
            self._requests[key], self._keys[request_id] = request_id, key

    def release(self, key: str) -> str:
        """Nobody will read a prefill: its request, "" where none with that key is known."""
        request_id = self._requests.get(key, "")
        if request_id:
            self.forget(request_id)
            self.unwanted.add(request_id)
        elif key:
            self._early[key] = None
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
        return request_id

    def forget(self, request_id: str) -> None:
        """A prefill is neither computed nor kept any more."""
        self.unwanted.discard(request_id)
        self._requests.pop(self._keys.pop(request_id, ""), None)
