"""The ring's memory orders, under a processor that reorders all that they allow.

Each scenario is a few lines of the C core, quoted; their orders are read off the quotations.
Nothing may go wrong in any execution, and with a weaker order something must: else the scenario
would prove nothing. csrc/shm/memory_orders.md has the argument in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from .weak_memory import ACQUIRE, RELAXED, RELEASE, SEQ_CST, State, Step, Thread, final_states

SOURCES = Path(__file__).parents[3] / "csrc" / "shm"
SLEEPER = 1

ADVANCE = "wait.h: atomic_store(cursor, value);"
LOOK_AT_EVENT = "wait.h: if (!(atomic_load(event) & RING_SLEEPER)) return;"
CHANGE_EVENT = (
    "wait.h: while (!atomic_compare_exchange_weak(event, &seen, (seen | RING_SLEEPER) + 1))"
)
WAKE = "wait.h: syscall(SYS_futex, event, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);"
TICKET = "wait.h: uint32_t ticket = atomic_fetch_or(wish->event, RING_SLEEPER) | RING_SLEEPER;"
LOOK_AGAIN = "wait.h: return atomic_load(wish->cursor) >= wish->target;"
SLEEP = "wait.h: long result = syscall(SYS_futex, event, FUTEX_WAIT, ticket, &timeout, NULL, 0);"
READ_HEAD = "read.h: atomic_load_explicit(&segment->head.position, memory_order_acquire);"
READ_TAIL = (
    "write.h: atomic_load_explicit(&end->readers[rank].cursor.position, memory_order_acquire);"
)
COPY_IN = "core.h: memcpy(end->data + at, from, first);"
COPY_OUT = "core.h: memcpy(to, end->data + at, first);"


def order_of(source: str) -> str:
    """As C says it: an atomic operation is sequentially consistent unless it says otherwise."""
    for order in (ACQUIRE, RELEASE, RELAXED):
        if f"memory_order_{order}" in source:
            return order
    return SEQ_CST if "atomic_" in source else RELAXED


def step(kind: str, at: str, source: str, **more: Any) -> Step:
    return Step(kind, at, order_of(source), source=source, **more)


@dataclass(frozen=True)
class Scenario:
    """Threads, what they begin with, and what is wrong at the end.

    ``needed``: (thread, quotation) of the steps whose order may not be weaker, and the weaker one.
    """

    threads: Sequence[Thread]
    memory: dict[str, int]
    is_wrong: Callable[[State, bool], bool]
    needed: Sequence[tuple[int, str, str]]


def goes_wrong(scenario: Scenario, threads: Sequence[Thread]) -> bool:
    states = list(final_states(threads, scenario.memory))
    assert states
    return any(scenario.is_wrong(*found) for found in states)


def waker(cursor: str, value: int, name: str) -> list[Step]:
    """ring_advance."""
    told = {"when": lambda r: bool(r[name] & SLEEPER), "needs": (name,)}
    return [
        step("store", cursor, ADVANCE, value=value),
        step("load", "event", LOOK_AT_EVENT, into=name),
        step("rmw", "event", CHANGE_EVENT, change=lambda seen: (seen | SLEEPER) + 1, **told),
        step("wake", "event", WAKE, **told),
    ]


def sleeper(cursor: str, target: int, name: str) -> list[Step]:
    """ring_park, once around."""
    ticket, seen = f"{name} ticket", f"{name} seen"
    return [
        step("rmw", "event", TICKET, into=ticket, change=lambda found: found | SLEEPER),
        step("load", cursor, LOOK_AGAIN, into=seen),
        step(
            *("sleep", "event", SLEEP),
            value=lambda r: r[ticket] | SLEEPER,
            when=lambda r: r[seen] < target,
            needs=(ticket, seen),
        ),
    ]


def record_reader(number: int) -> list[Step]:
    """Two records, one after the other, through room for one."""
    steps: list[Step] = []
    for record in (1, 2):
        steps += [
            step("wait", "head", READ_HEAD, value=record),
            step("load", "data", COPY_OUT, into=f"reader {number} got {record}"),
            step("store", f"tail {number}", ADVANCE, value=record),
        ]
    return steps


def record_writer(n_readers: int) -> list[Step]:
    return [
        step("store", "data", COPY_IN, value=1),
        step("store", "head", ADVANCE, value=1),
        *(step("wait", f"tail {number}", READ_TAIL, value=1) for number in range(n_readers)),
        step("store", "data", COPY_IN, value=2),
        step("store", "head", ADVANCE, value=2),
    ]


def a_record_is_not_whole(state: State, ended: bool) -> bool:
    got = [(name, value) for name, value in state.registers if " got " in name]
    return not ended or any(int(name[-1]) != value for name, value in got)


def somebody_sleeps(_: State, ended: bool) -> bool:
    return not ended


def sleeps_although_there(state: State, ended: bool) -> bool:
    return not ended and dict(state.memory)["tail"] >= 2


WANTED = "wait.h: atomic_store(wish->wanted, lenient ? wish->lenient : wish->target);"
LOOK_AT_WANTED = "wait.h: if (wanted != NULL && value < atomic_load(wanted)) return;"


def reader_that_is_waited_for(value: int) -> list[Step]:
    """ring_advance with a position from which on the writer wants to be woken."""
    event, wanted = f"event {value}", f"wanted {value}"
    told = {
        "when": lambda r: bool(r[event] & SLEEPER) and value >= r[wanted],
        "needs": (event, wanted),
    }
    advance, look, change, wake = waker("tail", value, event)
    look_at_wanted = step("load", "wanted", LOOK_AT_WANTED, into=wanted)
    return [advance, look, look_at_wanted, replace(change, **told), replace(wake, **told)]


CANCEL = "wait.h: atomic_store(&waiter->cancelled, 1);"
WHOM = "wait.h: ring_event *event = atomic_load(&waiter->waiting_on);"
WAITS_ON = "wait.h: atomic_store(&waiter->waiting_on, wish->event);"
IS_CANCELLED = "wait.h: if (atomic_load(&waiter->cancelled)) return RING_CANCELLED;"
TOLD = {"when": lambda r: r["whom"] == 1, "needs": ("whom",)}

LOCKED = "core.h: who->locked = ring_lock(end->waiter.fd, end->rank) == 0;"
ATTACHED = "core.h: atomic_store(&who->state, RING_ATTACHED);"
IS_ATTACHED = "write.h: if (atomic_load(&reader->identity.state) == RING_ATTACHED &&"
IS_LOCKED = "file.h: if (fd < 0 || !who->locked ||"

CAPACITY = "core.h: header->capacity = end->capacity;"
MAGIC = "core.h: atomic_store_explicit(&header->magic, RING_MAGIC, memory_order_release);"
IS_MAGIC = "layout.h: if (atomic_load_explicit(&header->magic, memory_order_acquire) != RING_MAGIC)"
IS_CAPACITY = "layout.h: if (header->capacity != capacity)"


def published_before_it_is_whole(state: State, _: bool) -> bool:
    registers = dict(state.registers)
    return registers["flag"] == 1 and registers["content"] != 1


def published(content: str, store: str, load: str, flag: str, tell: str, look: str) -> Scenario:
    """One thread writes *content*, then *flag*; who sees the flag must see the content."""
    return Scenario(
        [
            [step("store", content, store, value=1), step("store", flag, tell, value=1)],
            [step("load", flag, look, into="flag"), step("load", content, load, into="content")],
        ],
        {content: 0, flag: 0},
        published_before_it_is_whole,
        [(0, tell, RELAXED), (1, look, RELAXED)],
    )


SCENARIOS = {
    "records through room for one, to two readers": Scenario(
        [record_writer(2), record_reader(0), record_reader(1)],
        {"data": 0, "head": 0, "tail 0": 0, "tail 1": 0},
        a_record_is_not_whole,
        [(0, ADVANCE, RELAXED), (1, READ_HEAD, RELAXED), (2, ADVANCE, RELAXED)],
    ),
    "one wake-up for two sleepers": Scenario(
        [waker("head", 1, "event seen"), sleeper("head", 1, "one"), sleeper("head", 1, "other")],
        {"head": 0, "event": 0},
        somebody_sleeps,
        [(0, ADVANCE, RELEASE), (0, LOOK_AT_EVENT, ACQUIRE), (2, TICKET, RELAXED)],
    ),
    "a writer that wants to be woken late": Scenario(
        [
            [*reader_that_is_waited_for(1), *reader_that_is_waited_for(2)],
            [step("store", "wanted", WANTED, value=2), *sleeper("tail", 2, "writer")],
        ],
        {"tail": 0, "event": 0, "wanted": 9},
        sleeps_although_there,
        [(0, ADVANCE, RELEASE), (0, LOOK_AT_EVENT, RELAXED), (1, TICKET, RELAXED)],
    ),
    "a cancellation": Scenario(
        [
            [
                step("store", "cancelled", CANCEL, value=1),
                step("load", "waiting_on", WHOM, into="whom"),
                step("rmw", "event", CHANGE_EVENT, change=lambda seen: (seen | 1) + 1, **TOLD),
                step("wake", "event", WAKE, **TOLD),
            ],
            [
                step("store", "waiting_on", WAITS_ON, value=1),
                step("rmw", "event", TICKET, into="ticket", change=lambda found: found | 1),
                step("load", "cancelled", IS_CANCELLED, into="end"),
                step(
                    *("sleep", "event", SLEEP),
                    value=lambda r: r["ticket"] | SLEEPER,
                    when=lambda r: r["end"] == 0,
                    needs=("ticket", "end"),
                ),
            ],
        ],
        {"cancelled": 0, "waiting_on": 0, "event": 0},
        somebody_sleeps,
        [(0, CANCEL, RELEASE), (0, WHOM, ACQUIRE)],
    ),
    "a reader that attaches": published(
        "locked", LOCKED, IS_LOCKED, "state", ATTACHED, IS_ATTACHED
    ),
    "a new segment": published("capacity", CAPACITY, IS_CAPACITY, "magic", MAGIC, IS_MAGIC),
}
WEAKER = [(name, *needed) for name, scenario in SCENARIOS.items() for needed in scenario.needed]


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_execution_goes_wrong(name: str) -> None:
    assert not goes_wrong(SCENARIOS[name], SCENARIOS[name].threads)


@pytest.mark.parametrize(("name", "thread", "source", "weaker"), WEAKER)
def test_with_a_weaker_order_one_does(name: str, thread: int, source: str, weaker: str) -> None:
    scenario = SCENARIOS[name]
    threads = [list(steps) for steps in scenario.threads]
    changed = [
        replace(one, order=weaker) if one.source == source else one for one in threads[thread]
    ]
    assert changed != threads[thread]
    threads[thread] = changed
    assert goes_wrong(scenario, threads)


def quoted() -> list[str]:
    threads = [steps for scenario in SCENARIOS.values() for steps in scenario.threads]
    return sorted({one.source for steps in threads for one in steps})


@pytest.mark.parametrize("source", quoted())
def test_the_core_has_the_lines_that_are_checked(source: str) -> None:
    file, _, text = source.partition(": ")
    words = " ".join((SOURCES / file).read_text(encoding="utf-8").split())
    assert text in words


def test_a_processor_without_orders_shows_all_four_outcomes() -> None:
    """The store buffer: each writes, then looks whether the other has."""
    for order, expected in ((RELAXED, 4), (SEQ_CST, 3)):
        threads = [
            [Step("store", mine, order, value=1), Step("load", other, order, into=other)]
            for mine, other in (("a", "b"), ("b", "a"))
        ]
        found = {state.registers for state, _ in final_states(threads, {"a": 0, "b": 0})}
        assert len(found) == expected
