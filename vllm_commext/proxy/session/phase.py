"""Phases of a request, and the moves between them; docs/design/requests.md says when."""

import time
from collections.abc import Mapping

from vllm_commext.errors import Reason
from vllm_commext.proxy.outcome import Mark


class Phase(Reason):
    ASKED = "asked", "no engine works on it"
    PLANNED = "planned", "its engines are chosen; a decode engine may be computing all of it"
    PREFILLING = (
        "prefilling",
        "a prefill engine computes the prompt; a decode engine may read it",
    )
    OPENED = "opened", "a decode engine has begun to answer"
    RELAYING = "relaying", "the client gets the answer"
    MOVING = "moving", "the answer has stopped, while another decode engine repeats it"
    DONE = "done", "the client has the answer or an error, or has gone"


_A, _P, _F, _O, _R, _M, _D = Phase
MOVES: Mapping[Phase, frozenset[Phase]] = {
    _A: frozenset((_P, _D)),
    _P: frozenset((_A, _F, _O, _D)),
    _F: frozenset((_A, _O, _D)),
    _O: frozenset((_R, _D)),
    _R: frozenset((_A, _M, _D)),
    _M: frozenset((_R, _D)),
    _D: frozenset(),
}


class Life:
    """A request's phase, each with its mark. Raises `RuntimeError` for a move that there is not."""

    phase = Phase.ASKED

    def __init__(self, marks: list[Mark]) -> None:
        self._marks = marks

    def enter(self, phase: Phase) -> None:
        if phase not in MOVES[self.phase]:
            raise RuntimeError(f"a request that is {self.phase} cannot be {phase} next")
        self.phase = phase
        self._marks.append((time.monotonic(), phase, ""))
