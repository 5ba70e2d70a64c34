"""Parts of a request's time, from its marks.  Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from vllm_commext.proxy.outcome import (
    DECODE_ANSWERS,
    DECODE_ASKED,
    PREFILL_ASKED,
    PREFILLED,
    Mark,
)
from vllm_commext.proxy.session.phase import Phase

QUEUE, PREFILL, ASK, FIRST_TOKEN, DECODE, MOVE = PARTS = (
    *("queue", "prefill", "ask", "first token", "decode", "move"),
)


class Part(NamedTuple):
    """One step of a request, from *began* until *ended*, seconds of ``time.monotonic``; engine: its
    name or ""."""

    name: str
    engine: str
    began: float
    ended: float


_ENDS: dict[str, tuple[str, ...]] = {
    PREFILL_ASKED: (QUEUE,),
    PREFILLED: (PREFILL,),
    DECODE_ASKED: (QUEUE, ASK, FIRST_TOKEN),
    DECODE_ANSWERS: (ASK,),
    Phase.OPENED: (QUEUE, ASK, FIRST_TOKEN),
    Phase.RELAYING: (ASK, FIRST_TOKEN, MOVE),
    Phase.MOVING: (DECODE,),
    Phase.ASKED: PARTS,
    Phase.DONE: PARTS,
}
_BEGINS = {
    PREFILL_ASKED: PREFILL,
    DECODE_ASKED: ASK,
    DECODE_ANSWERS: FIRST_TOKEN,
    Phase.RELAYING: DECODE,
    Phase.MOVING: MOVE,
    Phase.ASKED: QUEUE,
}


def parts_of(began: float, marks: Iterable[Mark]) -> list[Part]:
    """All parts, as they ended.  A part that has not ended is left out."""
    running, found, answers = {QUEUE: (began, "")}, list[Part](), ""
    for at, what, engine in marks:
        for name in _ENDS.get(what, ()):
            if name in running:
                since, asked = running.pop(name)
                found.append(Part(name, asked, since, at))
        if what == DECODE_ASKED:
            answers = engine
        if (name := _BEGINS.get(what)) is not None:
            running[name] = at, engine or (answers if name == DECODE else "")
    return found
