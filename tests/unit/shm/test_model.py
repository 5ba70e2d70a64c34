"""Any sequence of calls on a queue against the model of it: a list for each reader."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kit.threads import in_thread
from vllm_commext.shm.queue import MessageQueue

from .test_steps import Explodes

RANKS = (5, 2)  # not 0 and 1, and not in order
RING_BYTES = 64 << 10


class CannotBePickled:
    def __reduce__(self) -> Any:
        raise KeyError("no")


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        shape: dict[str, Any] = {"max_chunk_bytes": RING_BYTES // 4, "max_chunks": 4}
        self.writer = MessageQueue(2, 2, list(RANKS), **shape)
        handle = self.writer.export_handle()
        self.readers = [MessageQueue.create_from_handle(handle, rank) for rank in RANKS]
        self.pending: list[list[Any]] = [[], []]
        self.num_sent = 0
        self.shut_down = [False, False]

    def sent(self, obj: object) -> None:
        self.num_sent += 1
        for pending in self.pending:
            pending.append(obj)

    @rule(size=st.integers(0, 2 * RING_BYTES), out_of_band=st.booleans())
    def send_if_there_is_room(self, size: int, out_of_band: bool) -> None:
        """A large array may not fit; then nobody gets it. It changes after it was sent."""
        array = np.full(size, self.num_sent % 251, dtype=np.uint8)
        expected = array.copy() if out_of_band else array.tobytes()
        try:
            self.writer.enqueue(array if out_of_band else expected, timeout=0)
        except TimeoutError:
            return
        array[:] = 255
        self.sent(expected)

    @rule()
    def send_what_explodes(self) -> None:
        try:
            self.writer.enqueue(Explodes(), timeout=0)
        except TimeoutError:
            return
        self.sent(Explodes)

    @rule()
    def fail_to_send(self) -> None:
        with pytest.raises(KeyError):
            self.writer.enqueue([np.zeros(40_000), CannotBePickled()], timeout=0)

    def take(self, place: int, timeout: float) -> None:
        expected = self.pending[place].pop(0)
        if expected is Explodes:
            with pytest.raises(ZeroDivisionError):
                self.readers[place].dequeue(timeout=timeout)
        else:
            got = self.readers[place].dequeue(timeout=timeout)
            assert type(got) is type(expected)
            np.testing.assert_array_equal(got, expected)

    @rule(place=st.integers(0, 1))
    def receive(self, place: int) -> None:
        if self.pending[place]:
            self.take(place, timeout=0)
        else:
            error = RuntimeError if self.shut_down[place] else TimeoutError
            with pytest.raises(error):
                self.readers[place].dequeue(timeout=0)

    @rule(size=st.integers(RING_BYTES, 5 * RING_BYTES))
    def stream_beyond_the_ring(self, size: int) -> None:
        """The writer waits for both readers, who wait for the writer."""
        if any(self.shut_down):
            return
        obj = bytes([self.num_sent % 251]) * size
        writing, written = in_thread(lambda: self.writer.enqueue(obj, timeout=60))
        self.sent(obj)
        other, drained = in_thread(lambda: self.drain(1))
        self.drain(0)
        other.join(20)
        writing.join(20)
        assert (written, drained, self.pending) == ([None], [None], [[], []])

    def drain(self, place: int) -> None:
        while self.pending[place]:
            self.take(place, timeout=60)

    @rule(place=st.integers(0, 1))
    def shut_a_reader_down(self, place: int) -> None:
        """It still gets what is there. Not before some messages; and that is no precondition, for
        what has had room depends on how far two threads have read, and Hypothesis must not."""
        if self.num_sent <= 10:
            return
        self.readers[place].shutdown()
        self.shut_down[place] = True

    @invariant()
    def the_counters_tell_who_is_where(self) -> None:
        assert self.writer.counters()["messages"] == self.num_sent
        for reader, pending in zip(self.readers, self.pending, strict=True):
            assert reader.counters()["messages"] == self.num_sent - len(pending)


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestQueue = QueueMachine.TestCase
