"""A read that is posted to NIXL piece by piece, and looked at until all of them have ended.

NIXL holds the interpreter's lock while it makes or releases a read, in proportion to the number of
descriptors: 40,000 of them would stop the engine's thread for milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS, NixlAgent
from vllm_commext.nixl.transport.pauses import in_pieces, pause

MAX_DESCRIPTORS = 4096
"""In one piece of a read."""


def pieces_of_read(
    agent: NixlAgent, local_list: Any, remote_list: Any, pairs: Pairs
) -> Iterator[Any]:
    """NIXL's handles of a read, each made when it is asked for."""
    for part in in_pieces(len(pairs.local), MAX_DESCRIPTORS):
        yield agent.make_read(local_list, pairs.local[part], remote_list, pairs.remote[part])


class Posting:
    """Pieces of one read under way.

    Args:
        agent: whose reads they are.
        pieces: NIXL's handles; each is posted before the next one is taken.

    Attributes: ``num_merged``: descriptors that NIXL moved in the pieces that have ended, after it
        merged neighbours.

    Raises:
        Exception: what NIXL raises where the first piece cannot be made or posted; nothing is under
            way then.  Where a later one fails, ``look`` tells, after the others' end.
    """

    def __init__(self, agent: NixlAgent, pieces: Iterable[Any]) -> None:
        self._agent = agent
        self._handles: list[Any] = []
        self._error = ""
        self.num_merged = 0
        try:
            for handle in pieces:
                self._post(handle)
        except Exception as error:
            if not self._handles:
                raise
            self._error = str(error)

    def _post(self, handle: Any) -> None:
        try:
            self._agent.post(handle)
        except Exception:
            self._release(handle)
            raise
        self._handles.append(handle)

    @property
    def num_open(self) -> int:
        """Pieces that have not ended, as far as ``look`` has seen."""
        return len(self._handles)

    def look(self) -> str | None:
        """None while a piece is under way; then what went wrong, "" where nothing did."""
        while self._handles:
            state, text = self._state(self._handles[0])
            if state == IN_PROGRESS:
                return None
            handle = self._handles.pop(0)
            try:
                if state == DONE:
                    self.num_merged += self._agent.num_merged(handle)
                else:
                    self._error = self._error or text or state
            finally:
                self._release(handle)
            if self._handles:
                pause()
        return self._error

    def _state(self, handle: Any) -> tuple[str, str]:
        try:
            return self._agent.state(handle), ""
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the piece has ended
            return "an error", str(error)

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_read(handle)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the piece has ended
            logger.warning("NIXL did not release a read cleanly: %s", error)
