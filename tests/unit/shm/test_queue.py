"""The queue in one process and between processes, without vLLM."""

import gc
import itertools
import logging
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.inquiry import wait_for
from tests.kit.threads import in_thread
from vllm_commext.errors import ProtocolError
from vllm_commext.shm.queue import MessageQueue
from vllm_commext.shm.ring import next_steps


def make(n_reader: int = 1, **options: Any) -> tuple[MessageQueue, list[MessageQueue]]:
    writer = MessageQueue(n_reader, n_reader, **options)
    handle = pickle.loads(pickle.dumps(writer.export_handle()))
    readers = [MessageQueue.create_from_handle(handle, r) for r in handle.local_reader_ranks]
    return writer, readers


def test_ranks_that_are_not_consecutive_have_their_places() -> None:
    writer, readers = make(2, local_reader_ranks=[7, 3])
    assert [reader.local_reader_rank for reader in readers] == [0, 1]
    assert writer.broadcast_object("both") == "both"
    assert [reader.broadcast_object() for reader in readers] == ["both", "both"]
    with pytest.raises(ValueError, match="expected 2 local_reader_ranks"):
        MessageQueue(2, 2, local_reader_ranks=[1])
    with pytest.raises(ProtocolError, match="rank 5 is none of the queue's local readers"):
        MessageQueue.create_from_handle(writer.export_handle(), 5)


def test_readers_on_other_hosts_and_arenas_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 2 n_local_reader and no arena, got 1 and False"):
        MessageQueue(2, 1, connect_ip="127.0.0.1")
    with pytest.raises(ValueError, match="got 1 and True: .* need vLLM's own queue"):
        MessageQueue(1, 1, enable_shm_tensor_arena=True)


def test_timeouts_shutdown_and_the_wrong_end() -> None:
    writer, [reader] = make(max_chunk_bytes=1024, max_chunks=1)
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0)
    writer.enqueue(b"x" * 200_000, timeout=0.01)  # alone it may go, whatever its length
    with pytest.raises(TimeoutError, match="reader 0"):
        writer.enqueue(b"x" * 200_000, timeout=0.01)
    assert reader.dequeue(timeout=60) == b"x" * 200_000
    with pytest.raises(RuntimeError, match="only the writer"):
        reader.enqueue(1)
    with pytest.raises(RuntimeError, match="only a reader"):
        writer.dequeue()
    thread, results = in_thread(reader.dequeue)
    reader.shutdown()
    reader.shutdown()
    thread.join(10)
    assert [str(result) for result in results] == ["cancelled"]
    assert reader.shutting_down
    writer.enqueue("still delivered")
    assert reader.dequeue() == "still delivered"
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(timeout=60)


def test_a_queue_without_readers_takes_everything() -> None:
    writer = MessageQueue(n_reader=0, n_local_reader=0)
    writer.wait_until_ready()
    for message in ("to nobody", np.arange(50_000), None):
        writer.enqueue(message, timeout=0)
    assert writer.broadcast_object("obj") == "obj"
    with pytest.raises(AttributeError, match="<lambda>"):  # what cannot be pickled is told here too
        writer.enqueue(lambda: 0)
    assert writer.counters() == {}
    writer.shutdown()


def test_a_long_wait_names_who_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "0.05")
    writer, [reader] = make(max_chunk_bytes=1024, max_chunks=1)
    with caplog.at_level(logging.INFO, "vllm.commext.shm"):
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.12)
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.12, indefinite=True)
        writer.enqueue(b"x" * 200_000)  # all that may be under way
        record = os.urandom(300_000)
        thread, results = in_thread(lambda: writer.enqueue(record))
        wait_for(lambda: "has not read" in caplog.text)
        assert reader.dequeue(timeout=60) == b"x" * 200_000
        assert reader.dequeue(timeout=60) == record  # begun before the lines, and not begun again
        thread.join(10)
    assert results == [None]
    lines = [entry.getMessage() for entry in caplog.records]
    process = f"(pid {os.getpid()}, alive, at message 0)"
    idle = f"writer {process} has not written for 0 s, says reader 0 of queue"
    assert sum(line.startswith(idle) for line in lines) == 2
    blocked = f"reader 0 {process} has not read for 0 s, says the writer of queue"
    assert any(line.startswith(blocked) for line in lines)


def test_local_traffic_needs_no_thread_and_a_descriptor_an_end() -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    ends = make(4)
    ends[0].enqueue(1)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1 + 4
    del ends
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_who_has_not_come_is_told_and_not_who_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "0.05")
    writer = MessageQueue(2, 2)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), 0)]
    with caplog.at_level(logging.INFO, "vllm.commext.shm"):
        thread, results = in_thread(writer.wait_until_ready)
        wait_for(lambda: "has not come" in caplog.text)
    lines = [entry.getMessage() for entry in caplog.records]
    assert lines[0].startswith("reader 1 (not attached, at message 0) has not come")
    readers.append(MessageQueue.create_from_handle(writer.export_handle(), 1))
    thread.join(10)
    assert results == [None]


# --- the steps of a long wait

# Whole seconds add up without rounding.
SECONDS = st.integers(1, 1000).map(float)


def test_without_a_limit_there_is_a_next_step_and_after_a_wait_for_ever_none() -> None:
    steps = itertools.islice(next_steps(60.0, 60.0, None), 3)
    assert list(steps) == [(60.0, 60.0, False), (120.0, 60.0, False), (180.0, 60.0, False)]
    assert list(next_steps(None, 60.0, None)) == []


@given(waited=SECONDS, interval=SECONDS, limit=SECONDS)
def test_steps_fill_the_time_to_the_limit(waited: float, interval: float, limit: float) -> None:
    steps = list(next_steps(waited, interval, limit))
    if waited >= limit:
        assert steps == []
        return
    assert [so_far for so_far, _, _ in steps] == [
        waited + sum(step for _, step, _ in steps[:number]) for number in range(len(steps))
    ]
    assert waited + sum(step for _, step, _ in steps) == limit
    assert {step for _, step, _ in steps[:-1]} <= {interval}
    assert 0 < steps[-1][1] <= interval
    assert [is_last for _, _, is_last in steps] == [False] * (len(steps) - 1) + [True]
