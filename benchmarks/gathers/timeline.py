"""When each part of a gathered read is asked for, packed, read and unpacked, as the threads see it;
all processes of a host share the clock."""

import time
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

from vllm_commext.nixl.gathered.packer import Packer
from vllm_commext.nixl.gathered.read import GatheredRead
from vllm_commext.nixl.gathered.slots import PART_BITS, word_of

Event = tuple[float, int, str]
"""Seconds of ``time.monotonic``, a part's word, what happened."""
Step = Callable[..., Any]
COLUMNS = {
    "asked": "asked",
    "heard": "P heard",
    "packing": "P packs",
    "packed": "P packed",
    "PACKED": "seen",
    "READING": "read",
    "UNPACKING": "was read",
    "HERE": "here",
}
BUSY = (("packing", "packed"), ("READING", "UNPACKING"), ("UNPACKING", "HERE"))


class Timeline:
    """What happened in this process since it was last taken."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def note(self, seconds: float, word: int, what: str) -> None:
        self._events.append((seconds, word, what))

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def watch_reading(self) -> None:
        """Note what all gathered reads of this process do, from now on."""

        def begin(original: Step, read: Any, *args: Any) -> None:
            now = time.monotonic()
            original(read, *args)
            for part in read._parts:
                self.note(now, part.word, "asked")

        def move(original: Step, read: Any, part: Any, phase: Any) -> None:
            self.note(time.monotonic(), part.word, phase.name)
            original(read, part, phase)

        extend(GatheredRead, __init__=begin, _move=move)

    def watch_packing(self) -> None:
        """Note what all packers of this process do, from now on."""
        begun: dict[int, float] = {}

        def take(original: Step, packer: Any, ask: Any) -> None:
            for number in range(ask.first, ask.first + len(ask.parts)):
                self.note(time.monotonic(), word_of(ask.ticket, number), "heard")
            original(packer, ask)

        def pack(original: Step, packer: Any, number: int, *args: Any) -> Any:
            begun[number] = time.monotonic()
            return original(packer, number, *args)

        def look(original: Step, packer: Any, number: int, slot: Any) -> None:
            word, was_packing = word_of(slot.ticket, slot.part), slot.posting is not None
            if was_packing and number in begun:
                self.note(begun.pop(number), word, "packing")
            original(packer, number, slot)
            if was_packing and slot.posting is None:
                self.note(time.monotonic(), word, "packed")

        extend(Packer, _take_ask=take, _pack=pack, _look=look)


def extend(owner: type, **steps: Step) -> None:
    """Have methods of a class given, as they are, to functions that take their places."""
    for name, step in steps.items():
        setattr(owner, name, partialmethod(_call, step, getattr(owner, name)))


def _call(owner: Any, step: Step, original: Step, *args: Any) -> Any:
    return step(original, owner, *args)


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of them goes on."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def table(decode: Sequence[Event], prefill: Sequence[Sequence[Event]]) -> str:
    """A row a part, in milliseconds since the load began, "" for none; then how long anything was
    packed, read and unpacked.

    Args:
        decode: events of the worker that reads.
        prefill: of each rank that is read.
    """
    began = min((seconds for seconds, _, what in decode if what == "begun"), default=0.0)
    parts: dict[int, dict[str, float]] = {}
    for seconds, word, what in decode:
        if word:
            parts.setdefault(word, {})[what] = 1e3 * (seconds - began)
    ranks: dict[int, int] = {}
    for rank, events in enumerate(prefill):
        for seconds, word, what in events:
            if word in parts:
                parts[word][what], ranks[word] = 1e3 * (seconds - began), rank
    if not parts:
        return ""
    lines = [f"| part | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for word in sorted(parts, key=lambda one: (ranks.get(one, -1), parts[one]["asked"], one)):
        times = (f"{parts[word][what]:.2f}" if what in parts[word] else "-" for what in COLUMNS)
        name = f"{ranks.get(word, '-')}.{word % (1 << PART_BITS)}"
        lines.append(f"| {name} | {' | '.join(times)} |")
    for begin, end in BUSY:
        spans = [(one[begin], one[end]) for one in parts.values() if begin in one and end in one]
        lines.append(f"- from {begin!r} to {end!r}: {busy_seconds(spans):.2f} ms of any part")
    return "\n".join(lines)
