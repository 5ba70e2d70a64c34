"""The queue in one process and between processes, without vLLM."""

import contextlib
import gc
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from tests.kit.threads import in_thread
from vllm_commext.errors import ProtocolError
from vllm_commext.shm import admission
from vllm_commext.shm.queue import Handle, MessageQueue, ShmRingBuffer

LOCAL = "127.0.0.1"


def make(n_reader: int = 1, **options: Any) -> tuple[MessageQueue, list[MessageQueue]]:
    writer = MessageQueue(n_reader, n_reader, **options)
    handle = pickle.loads(pickle.dumps(writer.export_handle()))
    readers = [MessageQueue.create_from_handle(handle, r) for r in handle.local_reader_ranks]
    return writer, readers


def test_objects_arrive_in_order_at_every_reader() -> None:
    writer, readers = make(3)
    objects = [1, "two", {"three": [3]}, None, b"x" * 100_000, np.arange(50_000)]
    for obj in objects:
        writer.enqueue(obj)
        for reader in readers:
            np.testing.assert_array_equal(reader.dequeue(timeout=5), obj)
    assert [reader.local_reader_rank for reader in readers] == [0, 1, 2]
    assert writer.counters()["messages"] == readers[2].counters()["messages"] == len(objects)


def test_messages_far_beyond_the_ring_and_the_chunk_size() -> None:
    writer, [reader] = make(max_chunk_bytes=1024, max_chunks=2)
    large = [os.urandom(3_000_000), np.random.default_rng(0).integers(0, 9, 500_000)]
    for obj in large:
        thread, results = in_thread(lambda obj=obj: writer.enqueue(obj, timeout=20))
        np.testing.assert_array_equal(reader.dequeue(timeout=20), obj)
        thread.join(20)
        assert results == [None]


def test_content_is_that_of_enqueue_and_then_the_readers_own() -> None:
    writer, [reader] = make()
    array = np.zeros(300_000, dtype=np.uint8)
    writer.enqueue(array)
    array[:] = 1
    received = reader.dequeue(timeout=5)
    for _ in range(20):
        writer.enqueue(np.full(300_000, 2, dtype=np.uint8), timeout=5)
        reader.dequeue(timeout=5)
    assert not received.any()
    received[:] = 3


def test_ranks_that_are_not_consecutive_have_their_places() -> None:
    writer, readers = make(2, local_reader_ranks=[7, 3])
    writer.enqueue("both")
    assert [reader.dequeue(timeout=5) for reader in readers] == ["both", "both"]
    with pytest.raises(ValueError, match="expected 2 local_reader_ranks"):
        MessageQueue(2, 2, local_reader_ranks=[1])
    with pytest.raises(ProtocolError, match="rank 5 is none of the queue's local readers"):
        MessageQueue.create_from_handle(writer.export_handle(), 5)


def test_timeouts_shutdown_and_the_wrong_end() -> None:
    writer, [reader] = make(max_chunk_bytes=1024, max_chunks=1)
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0)
    writer.enqueue(b"x" * 200_000, timeout=0.01)  # alone it may go, whatever its length
    with pytest.raises(TimeoutError, match="reader 0"):
        writer.enqueue(b"x" * 200_000, timeout=0.01)
    assert reader.dequeue(timeout=5) == b"x" * 200_000
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
        reader.dequeue(timeout=5)


def test_an_error_while_unpickling_consumes_the_message() -> None:
    writer, [reader] = make()
    writer.enqueue(Explodes())
    writer.enqueue("next")
    with pytest.raises(ZeroDivisionError):
        reader.dequeue(timeout=5)
    assert reader.dequeue(timeout=5) == "next"


class Explodes:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


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


def test_readiness_is_collective() -> None:
    writer, [reader] = make()
    thread, results = in_thread(reader.wait_until_ready)
    time.sleep(0.02)
    assert results == []
    writer.wait_until_ready()
    thread.join(10)
    assert results == [None]


def test_broadcast_object_and_raw_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "1000")
    writer, [reader] = make(max_chunk_bytes=64, max_chunks=2)
    assert writer.broadcast_object("obj") == "obj"
    assert reader.broadcast_object() == "obj"
    with writer.acquire_write(timeout=5) as memory:
        memory[:4] = b"data"
    with reader.acquire_read(timeout=5) as received:
        assert bytes(received) == b"data" + bytes(60)
    with pytest.raises(TimeoutError), reader.acquire_read(timeout=0):
        pass


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
        deadline = time.monotonic() + 10
        while "has not read" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reader.dequeue(timeout=10) == b"x" * 200_000
        assert reader.dequeue(timeout=10) == record  # begun before the lines, and not begun again
        thread.join(10)
    assert results == [None]
    lines = [entry.getMessage() for entry in caplog.records]
    process = f"(pid {os.getpid()}, alive, at message 0)"
    idle = f"writer {process} has not written for 0 s, says reader 0 of queue"
    assert sum(line.startswith(idle) for line in lines) == 2
    blocked = f"reader 0 {process} has not read for 0 s, says the writer of queue"
    assert any(line.startswith(blocked) for line in lines)


def test_a_buffer_is_pickled_by_its_handle() -> None:
    buffer = ShmRingBuffer(2, 1024, 4)
    other = pickle.loads(pickle.dumps(buffer))
    assert (other.n_reader, other.max_chunk_bytes, other.max_chunks) == (2, 1024, 4)
    assert (buffer.is_creator, other.is_creator) == (True, False)
    reader = other.attach(1)
    assert buffer.writer is not None
    buffer.writer.write(b"through the pickled one")
    assert reader.read(timeout=5) == b"through the pickled one"


def test_a_queue_of_another_kind_is_refused_in_plain_words() -> None:
    writer, _ = make()
    handle = writer.export_handle().buffer_handle
    assert handle is not None
    with pytest.raises(ProtocolError, match="VLLM_COMMEXT_SHM_QUEUE"):
        tuple(handle)  # what vLLM's own queue does first
    with pytest.raises(ProtocolError, match="VLLM_COMMEXT_SHM_QUEUE"):
        MessageQueue.create_from_handle(object(), 0)  # pyright: ignore[reportArgumentType]


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


def make_remote(
    host: str = LOCAL, n_local: int = 0, **options: Any
) -> tuple[MessageQueue, list[MessageQueue]]:
    writer = MessageQueue(n_local + 1, n_local, connect_ip=host, **options)
    return writer, attached(writer, [*range(n_local), -1])


def attached(writer: MessageQueue, ranks: Sequence[int]) -> list[MessageQueue]:
    """All readers of the writer, which come again where the machine stood still as they came."""
    handle: Handle = pickle.loads(pickle.dumps(writer.export_handle()))
    readers = [MessageQueue.create_from_handle(handle, rank) for rank in ranks]
    threads = [in_thread(reader.wait_until_ready) for reader in readers]
    writer.wait_until_ready()
    for thread, results in threads:
        thread.join(10)
        assert results == [None]
    return readers


@pytest.mark.parametrize("host", [LOCAL, "::1"])
@pytest.mark.parametrize("n_local", [0, 2])
def test_remote_readers_get_the_same(host: str, n_local: int) -> None:
    writer, readers = make_remote(host, n_local)
    array = np.arange(200_000).reshape(2, 100, 1000)
    for obj in ("text", b"y" * 200_000, array):
        writer.enqueue(obj, timeout=5)
    array[:] = 0
    for reader in readers:
        assert reader.dequeue(timeout=5) == "text"
        assert reader.dequeue(timeout=5) == b"y" * 200_000
        received = reader.dequeue(timeout=5)
        assert (received.shape, received[-1, -1, -1]) == (array.shape, 199_999)
        received[0] = 1


def test_nothing_is_lost_before_a_remote_reader_has_come() -> None:
    writer = MessageQueue(1, 0, connect_ip=LOCAL)
    with pytest.raises(TimeoutError, match="0 of 1 remote readers attached"):
        writer.enqueue("nobody is there", timeout=0.01)
    thread, results = in_thread(lambda: writer.enqueue("first", timeout=20))
    reader = MessageQueue.create_from_handle(writer.export_handle(), -1)
    assert reader.dequeue(timeout=20) == "first"
    thread.join(20)
    assert results == [None]


def test_a_remote_wait_ends_by_timeout_and_by_shutdown() -> None:
    _writer, [reader] = make_remote()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.01)
    thread, results = in_thread(reader.dequeue)
    time.sleep(0.02)
    reader.shutdown()
    thread.join(10)
    assert [str(result) for result in results] == ["cancelled"]


def test_a_long_wait_for_a_remote_peer_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "0.05")
    writer, [reader] = make_remote(max_chunk_bytes=1 << 20, max_chunks=2)
    with caplog.at_level(logging.INFO, "vllm.commext.shm"):
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.12, indefinite=True)
        assert caplog.records == []
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.12)
        with pytest.raises(TimeoutError):  # noqa: PT012
            for _ in range(100_000):
                writer.enqueue(b"z" * 20_000, timeout=0.12)
    lines = [entry.getMessage() for entry in caplog.records]
    assert any(line.startswith("nothing from the writer at commext-tcp://") for line in lines)
    assert any("made room for 0 s, after message" in line for line in lines)


def test_a_stalled_remote_reader_holds_the_writer_up_and_loses_nothing() -> None:
    writer, [reader] = make_remote(max_chunk_bytes=1 << 20, max_chunks=2)
    sent = 0
    with pytest.raises(TimeoutError, match="no remote reader of .* made room"):  # noqa: PT012
        while sent < 100_000:
            writer.enqueue((sent, b"z" * 2000), timeout=0.05)
            sent += 1
    assert [reader.dequeue(timeout=5)[0] for _ in range(sent)] == list(range(sent))
    writer.enqueue("after", timeout=5)
    assert reader.dequeue(timeout=5) == "after"


def port_of(writer: MessageQueue) -> tuple[str, int]:
    """What a stranger may know, without what only the handle tells."""
    told = str(writer.handle.remote_subscribe_addr).removeprefix("commext-tcp://")
    return LOCAL, int(told.partition("/")[0].rpartition(":")[2])


GARBAGE = [
    b"",
    b"\xff" * 10 + b"\x03\x00NULL" + bytes(46),  # ZMQ's greeting
    b"\0" * 47,
    b"\0" * 48,
    os.urandom(1 << 20),
    b"GET / HTTP/1.1\r\n\r\n",
    b"VCXQ" + bytes(1000),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: f"{len(garbage)}")
def test_a_stranger_gets_nothing_and_holds_nobody_up(garbage: bytes) -> None:
    writer = MessageQueue(1, 0, connect_ip=LOCAL)
    # Who says nothing stays longest.
    num_strangers = 10 if garbage else admission.MOST_STRANGERS + 36
    strangers = [socket.create_connection(port_of(writer)) for _ in range(num_strangers)]
    for stranger in strangers:
        stranger.settimeout(60)
        with contextlib.suppress(OSError):  # it may be closed already
            stranger.sendall(garbage)
    [reader] = attached(writer, [-1])
    for number in range(50):
        writer.enqueue(number, timeout=20)
        assert reader.dequeue(timeout=20) == number
    for stranger in strangers:
        got = 0
        with contextlib.suppress(ConnectionError), stranger:
            while more := stranger.recv(4096):
                got += len(more)
        assert got <= admission.WELCOME.size
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(port_of(writer))


def test_what_a_reader_has_said_admits_nobody_else() -> None:
    writer = MessageQueue(2, 0, connect_ip=LOCAL)
    reader = MessageQueue.create_from_handle(writer.export_handle(), -1)
    token = bytes.fromhex(str(writer.handle.remote_subscribe_addr).rpartition("/")[2])
    with socket.create_connection(port_of(writer)) as first:
        nonce = admission.WELCOME.unpack(first.recv(admission.WELCOME.size))[2]
    said = bytes(16) + admission.proof(token, b"reader", nonce + bytes(16))
    with socket.create_connection(port_of(writer)) as again:
        again.settimeout(5)
        assert len(again.recv(admission.WELCOME.size)) == admission.WELCOME.size
        again.sendall(said)
        assert again.recv(1) == b""
    with pytest.raises(TimeoutError, match="1 of 2 remote readers attached"):
        writer.enqueue("one is missing", timeout=0.05)
    del reader


def test_a_stranger_in_the_writers_place_is_refused() -> None:
    with socket.create_server((LOCAL, 0)) as server:
        handle = Handle(
            remote_subscribe_addr=f"commext-tcp://{LOCAL}:{server.getsockname()[1]}/{'0' * 32}"
        )

        def answer(version: int) -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(admission.WELCOME.pack(b"VCXQ", version, bytes(16)))
                connection.sendall(bytes(32))
                with contextlib.suppress(ConnectionError):
                    connection.recv(48)

        for version, complaint in ((4, "got a stranger"), (3, "expected version 4")):
            thread, _ = in_thread(lambda version=version: answer(version))
            with pytest.raises(ProtocolError, match=complaint):
                MessageQueue.create_from_handle(handle, -1)
            thread.join(10)


def test_large_messages_both_ways_wait_for_nobody() -> None:
    """As between an engine and a worker that write to one another before either reads."""
    ends = [make_remote() for _ in range(2)]
    message = os.urandom(20 << 20)
    for writer, _ in ends:
        for _ in range(3):
            writer.enqueue(message, timeout=10)
    for _, [reader] in ends:
        assert [reader.dequeue(timeout=20) == message for _ in range(3)] == [True] * 3


def test_a_timed_out_remote_dequeue_goes_on_in_the_midst_of_a_message() -> None:
    writer, [reader] = make_remote()
    for stalls in range(5):
        message = [os.urandom(3_000_000), np.arange(stalls + 100_000)]
        thread, _ = in_thread(lambda message=message: writer.enqueue(message, timeout=20))
        deadline, got = time.monotonic() + 20, None
        while got is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                got = reader.dequeue(timeout=0)
        thread.join(20)
        assert got is not None
        assert got[0] == message[0]
        np.testing.assert_array_equal(got[1], message[1])


def test_who_has_not_come_is_told_and_not_who_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "0.05")
    writer = MessageQueue(2, 2)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), 0)]
    with caplog.at_level(logging.INFO, "vllm.commext.shm"):
        thread, results = in_thread(writer.wait_until_ready)
        deadline = time.monotonic() + 10
        while "has not come" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = [entry.getMessage() for entry in caplog.records]
    assert lines[0].startswith("reader 1 (not attached, at message 0) has not come")
    readers.append(MessageQueue.create_from_handle(writer.export_handle(), 1))
    thread.join(10)
    assert results == [None]


def test_the_end_of_a_remote_peer_is_told_to_the_other() -> None:
    writer, [reader] = make_remote()
    writer.enqueue("last")
    assert reader.dequeue(timeout=5) == "last"
    del reader
    with pytest.raises(RuntimeError, match="remote reader of .* has disconnected"):  # noqa: PT012
        for _ in range(1000):
            writer.enqueue("nobody")
            time.sleep(0.005)
    writer, [reader] = make_remote()
    del writer
    with pytest.raises(RuntimeError, match="connection to the writer .* broke after message 0"):
        reader.dequeue(timeout=10)


def test_a_remote_reader_refuses_what_is_not_this_queue() -> None:
    handle = Handle(remote_subscribe_addr="tcp://127.0.0.1:9")
    with pytest.raises(ProtocolError, match="VLLM_COMMEXT_SHM_QUEUE"):
        MessageQueue.create_from_handle(handle, -1)
