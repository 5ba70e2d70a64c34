"""What a prefill engine's side channel answers about streams: by key, where a prompt is read, and
which token follows."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from vllm_commext.nixl.wire.messages import FoundStream

MAX_ENDED = 4096
"""Keys of ended requests that are remembered, so that who comes too late is told so."""


class StreamDirectory:
    """Streams by key; safe for threads.

    Attributes: ``on_change``: called with a key of which something new is known, by who says it.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str], None] = lambda _: None
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
        self.on_change(key)

    def tell(self, key: str, first_token: int, sampling: str) -> None:
        """A prompt that can be read is computed, and this token follows, drawn by this."""
        with self._lock:
            known = self._found[key]
            self._found[key] = msgspec.structs.replace(
                known, first_token=first_token, sampling=sampling
            )
        self.on_change(key)

    def end(self, key: str) -> None:
        """Its blocks are going to be freed."""
        with self._lock:
            if self._found.pop(key, None) is not None:
                self._remember(key, FoundStream(refusal="the prefill has ended"))
        self.on_change(key)

    def find(self, keys: Iterable[str], awaited: Iterable[str] = ()) -> dict[str, FoundStream]:
        """What is known of these keys; of those *awaited*, if their first token is, or none
        follows."""
        with self._lock:
            known = {key: self._found.get(key) or self._ended.get(key) for key in keys}
            for key in awaited:
                stream = self._found.get(key) or self._ended.get(key)
                if stream is not None and (stream.first_token >= 0 or stream.refusal):
                    known[key] = stream
        return {key: stream for key, stream in known.items() if stream is not None}

    def _remember(self, key: str, stream: FoundStream) -> None:
        self._ended[key] = stream
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
