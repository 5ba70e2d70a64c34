"""The lease ledger against a plain model, through random histories."""

import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vllm_commext.nixl.prefill import leases
from vllm_commext.nixl.prefill.leases import LeaseLedger

EARLY_SECONDS = 30.0
MAX_AGE = 90
MAX_EARLY = 3


class LedgerMachine(RuleBasedStateMachine):
    """The model: releases by request in order of their coming, and what each request is."""

    unused = Bundle("unused")
    seen = Bundle("seen")

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(leases, "MAX_EARLY_RELEASES", MAX_EARLY)
        self.ledger = LeaseLedger(MAX_AGE)
        self.now = 0.0
        self.next_id = 0
        self.wanted: dict[str, int] = {}
        self.deadline: dict[str, float] = {}
        self.begun: dict[str, tuple[float, float]] = {}
        self.early_since: dict[str, float] = {}
        self.done_by: dict[str, set[str]] = {}
        self.reported: list[str] = []
        self.expected = Counter[str]()

    def teardown(self) -> None:
        self._patch.undo()

    @rule(target=unused, num_consumers=st.integers(1, 3))
    def come(self, num_consumers: int) -> str:
        self.next_id += 1
        request_id = f"r{self.next_id}"
        self.wanted[request_id] = num_consumers
        return request_id

    @rule(target=seen, request_id=consumes(unused), duration=st.integers(1, 60))
    def finish(self, request_id: str, duration: int) -> str:
        self.early_since.pop(request_id, None)
        known = self.done_by.setdefault(request_id, set())
        complete = len(known) >= self.wanted[request_id]
        assert self.ledger.hold(request_id, self.now, duration) == complete
        if complete:
            self._end(request_id)
        else:
            self.deadline[request_id] = self.now + duration
            self.begun[request_id] = (self.now, duration)
        return request_id

    @rule(request_id=seen, number=st.integers(0, 2))
    def release(self, request_id: str, number: int) -> None:
        self._release(request_id, f"c{number}")

    @rule(target=unused, request_id=consumes(unused), number=st.integers(0, 2))
    def release_early(self, request_id: str, number: int) -> str:
        self._release(request_id, f"c{number}")
        return request_id

    def _release(self, request_id: str, consumer: str) -> None:
        held = request_id in self.deadline
        if not held and request_id not in self.early_since:
            self.early_since[request_id] = self.now
            self.done_by[request_id] = set()
        known = self.done_by[request_id]
        last = held and consumer not in known and len(known) + 1 >= self.wanted[request_id]
        known.add(consumer)
        released = self.ledger.release(request_id, consumer, self.wanted[request_id], self.now)
        assert released == last
        if last:
            self._end(request_id)
        if len(self.early_since) > MAX_EARLY:
            self._forget_early(next(iter(self.early_since)))

    @rule(request_id=seen, reader=st.integers(0, 2))
    def beat(self, request_id: str, reader: int) -> None:
        is_held = request_id in self.deadline
        is_taken = is_held and f"c{reader}" not in self.done_by[request_id]
        assert self.ledger.extend(request_id, f"c{reader}", self.now) == is_taken
        self.expected["heartbeats" if is_taken else "ignored_heartbeats"] += 1
        if is_taken:
            begun, duration = self.begun[request_id]
            self.deadline[request_id] = min(self.now + duration, begun + MAX_AGE)

    @rule(request_id=unused)
    def beat_early(self, request_id: str) -> None:
        assert not self.ledger.extend(request_id, "c0", self.now)
        self.expected["ignored_heartbeats"] += 1

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        due = {name for name, deadline in self.deadline.items() if deadline <= self.now}
        ended = self.ledger.expire(self.now, EARLY_SECONDS)
        assert ended == {name: self.now - self.begun[name][0] for name in due}
        for request_id in ended:
            self._end(request_id)
        for request_id, since in list(self.early_since.items()):
            if since + EARLY_SECONDS <= self.now:
                self._forget_early(request_id)

    @rule()
    def take_counts(self) -> None:
        assert self.ledger.take_counts() == self.expected
        self.expected.clear()

    def _end(self, request_id: str) -> None:
        self.reported.append(request_id)
        self.deadline.pop(request_id, None)
        self.done_by.pop(request_id, None)

    def _forget_early(self, request_id: str) -> None:
        del self.early_since[request_id]
        del self.done_by[request_id]
        self.expected["unmatched_notifications"] += 1

    @invariant()
    def no_lease_is_older_than_it_may_be(self) -> None:
        assert all(self.deadline[name] <= self.begun[name][0] + MAX_AGE for name in self.deadline)

    @invariant()
    def each_request_is_reported_once_and_the_held_are_counted(self) -> None:
        assert len(self.reported) == len(set(self.reported))
        assert len(self.ledger) == len(self.deadline)


def test_a_lease_may_be_longer_than_the_age_up_to_which_heartbeats_extend_it() -> None:
    ledger = LeaseLedger(max_age=2.0)
    ledger.hold("r", 0.0, 5.0)
    assert ledger.extend("r", "d/0", 4.0)
    assert ledger.expire(4.9, EARLY_SECONDS) == {}
    assert ledger.expire(5.0, EARLY_SECONDS) == {"r": 5.0}


def test_a_dropped_lease_ends_once_whoever_has_released_it() -> None:
    ledger = LeaseLedger()
    assert not ledger.drop("r")
    ledger.hold("r", 0.0, 10.0)
    ledger.release("r", "d0", 2, 1.0)
    assert ledger.drop("r")
    assert not ledger.drop("r")
    assert len(ledger) == 0
    assert ledger.expire(11.0, 60.0) == {}


TestLedger: Any = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25)


def test_consumers_of_early_releases_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_EARLY_CONSUMERS", 10)
    ledger = LeaseLedger()
    for number in range(30):
        ledger.release("first", f"c{number % 8}", 1024, 0.0)
    assert ledger._num_early_consumers == 8
    for number in range(100):
        ledger.release(f"r{number % 7}", f"c{number}", 1024, 0.0)
        assert sum(len(one) for _, one, _ in ledger._early.values()) <= 10
    assert ledger._num_early_consumers == sum(len(one) for _, one, _ in ledger._early.values())
    last = next(reversed(ledger._early))
    kept = ledger._num_early_consumers
    assert not ledger.hold(last, 1.0, 60.0)
    assert ledger._num_early_consumers < kept
    ledger.expire(1000.0, 60.0)
    assert (ledger._num_early_consumers, ledger._early) == (0, {})


def test_what_releases_of_strangers_keep_is_bounded_in_bytes() -> None:
    """As many as get through, with the longest names that the wire lets pass."""
    ledger = LeaseLedger()
    tracemalloc.start()
    for number in range(40_000):
        ledger.release(f"{number % 5000:>128}", f"{number:>128}", 1024, 0.0)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 16 << 20
