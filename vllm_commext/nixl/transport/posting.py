"""A read that is posted piece by piece, and looked at until all pieces have ended.

NIXL holds the interpreter's lock while it makes or releases a read, in proportion to the number of
descriptors: 40,000 of them would stop the engine's thread for milliseconds. Long work of the I/O
thread is therefore done in pieces, with a pause after each: the engine's thread then waits for one
piece at most, and not ``sys.getswitchinterval()``, 5 ms."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS, NixlAgent

PAUSE_SECONDS = 20e-6  # long enough that a waiting thread has woken up and taken the lock


def pause() -> None:
    time.sleep(PAUSE_SECONDS)


def in_pieces(count: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that make up ``range(count)``, with a pause between two."""
    for begin in range(0, count, size):
        if begin:
            pause()
        yield slice(begin, min(begin + size, count))


MAX_DESCRIPTORS = 4096  # in one piece of a read


def pieces_of_read(
    agent: NixlAgent, local_list: Any, remote_list: Any, pairs: Pairs
) -> Iterator[Any]:
    for part in in_pieces(len(pairs.local), MAX_DESCRIPTORS):
        yield agent.make_read(local_list, pairs.local[part], remote_list, pairs.remote[part])


class Poster(Protocol):
    """Who reads, as far as a ``Posting`` needs it; ``NixlAgent`` says what each of them does."""

    def post(self, read: Any, /) -> str: ...

    def state(self, read: Any, /) -> str: ...

    def release_read(self, read: Any, /) -> None:
        """Give a piece back that has ended, or was not posted."""


class Reader(Protocol):
    """A way of reading one peer's cache.

    Attributes:
        name: as messages about its failures begin.
        is_mapped: through a mapping of the peer's memory, and not by NIXL.
    """

    name: str
    is_mapped: bool

    def post(self, pairs: Pairs) -> Posting: ...


class NixlReader:
    """Reads by NIXL; both lists are None where the plan has nothing to read."""

    name = "NIXL"
    is_mapped = False

    def __init__(self, agent: NixlAgent, local_list: Any, remote_list: Any) -> None:
        self._agent = agent
        self._local_list = local_list
        self._remote_list = remote_list

    def post(self, pairs: Pairs) -> Posting:
        pieces = pieces_of_read(self._agent, self._local_list, self._remote_list, pairs)
        return Posting(self._agent, pieces)


class Posting:
    """Pieces of one read under way, each posted before the next one is taken.

    Raises:
        Exception: the poster's where the first piece cannot be made or posted; nothing is under way
            then.  Where a later one fails, ``look`` tells, after the others' end.
    """

    def __init__(self, poster: Poster, pieces: Iterable[Any]) -> None:
        self._poster = poster
        self._handles: list[Any] = []
        self._error = ""
        try:
            for handle in pieces:
                self._post(handle)
        except Exception as error:
            if not self._handles:
                raise
            self._error = str(error)

    def _post(self, handle: Any) -> None:
        try:
            self._poster.post(handle)
        except Exception:
            self._release(handle)
            raise
        self._handles.append(handle)

    @property
    def num_open(self) -> int:
        return len(self._handles)

    def look(self) -> str | None:
        """None while a piece is under way; then what went wrong, "" where nothing did."""
        while self._handles:
            state, text = self._state(self._handles[0])
            if state == IN_PROGRESS:
                return None
            handle = self._handles.pop(0)
            if state != DONE:
                self._error = self._error or text or state
            self._release(handle)
            if self._handles:
                pause()
        return self._error

    def _state(self, handle: Any) -> tuple[str, str]:
        try:
            return self._poster.state(handle), ""
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the piece has ended
            return "an error", str(error)

    def _release(self, handle: Any) -> None:
        try:
            self._poster.release_read(handle)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the piece has ended
            logger.warning("a read was not released cleanly: %s", error)
