"""What a prefill engine's side channel answers about streams: by key, where a prompt is read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from vllm_commext.nixl.wire.messages import FoundStream

MAX_ENDED = 4096
"""Keys of ended requests that are remembered, so that who comes too late is told so."""


class StreamDirectory:
    """Streams by key; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, FoundStream] = {}
        self._ended: OrderedDict[str, FoundStream] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._found or key in self._ended

    def open(self, key: str, stream: FoundStream) -> None:
        """A prompt can be read, or never will be."""
        with self._lock:
            if stream.refusal:
                self._remember(key, stream)
            else:
                self._found[key] = stream

    def end(self, key: str) -> None:
        """Its blocks are going to be freed."""
        with self._lock:
            if self._found.pop(key, None) is not None:
                self._remember(key, FoundStream(refusal="the prefill has ended"))

    def find(self, keys: Iterable[str]) -> dict[str, FoundStream]:
        """What is known of these keys."""
        with self._lock:
            known = {key: self._found.get(key) or self._ended.get(key) for key in keys}
        return {key: stream for key, stream in known.items() if stream is not None}

    def _remember(self, key: str, stream: FoundStream) -> None:
        self._ended[key] = stream
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
