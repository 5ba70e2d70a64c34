"""`MessageQueue`: Python objects from one writer to N readers, in vLLM's own surface.

Readers on this host share a byte ring with the writer, all others are reached over ZMQ. Of every
object each reader gets an equal one, in order, once, with the content that it had at `enqueue`.
Local traffic needs no thread, no socket and no file descriptor.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from ..errors import CommextTimeoutError, ProtocolError
from .codec import Decoder, Encoder, Record, decode
from .handle import MIXED, Handle, ShmRingBuffer
from .remote import RemoteReader, RemoteWriter, parse
from .ring import TIMEOUT, Peer, RingEnd, RingReader, RingWriter
from .steps import StepClasses
from .waiting import SpinCondition, next_steps, warning_interval

logger = logging.getLogger("vllm.commext.shm")

LONGEST = threading.TIMEOUT_MAX
REENTERED = "this end of the queue is in use by the call that a signal handler interrupted"


class MessageQueue:
    """One end of a queue: the writer's if constructed, a reader's by `create_from_handle`.

    Args:
        n_reader: readers altogether.
        n_local_reader: those of them on this host.
        local_reader_ranks: their ranks; 0 to n_local_reader - 1 by default.
        max_chunk_bytes, max_chunks: what vLLM's queue would reserve. Messages of any length go
            through the ring, whose size is `layout.capacity_for` of the product.
        connect_ip: the address at which readers on other hosts reach this one.
        enable_shm_tensor_arena: accepted; large tensors go through the ring as all else.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks
        if len(ranks) != n_local_reader:
            raise ValueError(f"expected {n_local_reader} local_reader_ranks, got {ranks}")
        if enable_shm_tensor_arena:
            logger.info("the tensor arena is not used: large tensors are streamed through the ring")
        buffer = remote = None
        if n_local_reader > 0:
            buffer = ShmRingBuffer(n_local_reader, max_chunk_bytes, max_chunks)
        if n_reader > n_local_reader:
            remote = RemoteWriter(n_reader - n_local_reader, connect_ip or self.own_ip())
        handle = Handle(
            local_reader_ranks=ranks,
            buffer_handle=buffer.handle() if buffer is not None else None,
            remote_subscribe_addr=remote.invitation if remote is not None else None,
            remote_addr_ipv6=remote is not None and remote.is_ipv6,
        )
        self._set_up(handle, buffer, remote)
        self._is_writer = True
        self.n_local_reader = n_local_reader
        self.n_remote_reader = n_reader - n_local_reader
        if buffer is not None:
            self._use(buffer.writer)

    def _set_up(
        self,
        handle: Handle,
        buffer: ShmRingBuffer | None,
        remote: RemoteWriter | RemoteReader | None,
    ) -> None:
        """What both ends have in common."""
        self.handle, self.buffer, self._remote = handle, buffer, remote
        self.shutting_down = False
        self.local_reader_rank = -1
        self.local_socket = self.tensor_arena = None
        self.remote_socket = remote.socket if remote is not None else None
        self._is_writer = self._is_local_reader = self._is_remote_reader = False
        self._spin_condition = SpinCondition() if buffer is not None else None
        self._ring: RingEnd | None = None
        classes = self.step_classes()
        encoder = Encoder(classes)
        self._encode, self._forget_step = encoder.encode, encoder.forget
        self._decode = Decoder(classes).decode
        self._turn = threading.RLock()
        self._take_turn, self._end_turn = self._turn.acquire, self._turn.release  # 100 ns less
        self._owns_turn: Callable[[], bool] = self._turn._is_owned  # pyright: ignore
        self._interval = warning_interval()

    def _use(self, ring: RingEnd | None) -> None:
        assert ring is not None
        self._ring, self._core = ring, ring.core

    def export_handle(self) -> Handle:
        """What a reader's process needs for `create_from_handle`."""
        return self.handle

    @staticmethod
    def step_classes() -> StepClasses | None:
        """Of the steps that go field by field."""
        return None

    @staticmethod
    def own_ip() -> str:
        """The address at which other hosts reach this one."""
        raise ValueError("connect_ip: expected this host's address for remote readers, got None")

    @classmethod
    def create_from_handle(cls, handle: Handle, rank: int) -> "MessageQueue":
        """The reading end for `rank`: local if it is one of the handle's ranks, else remote."""
        if not isinstance(handle, Handle):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = f"{type(handle).__module__}.{type(handle).__qualname__}"
            raise ProtocolError(f"expected a handle of vllm_commext's queue, got {got}: {MIXED}")
        self = cls.__new__(cls)
        if rank in handle.local_reader_ranks:
            assert handle.buffer_handle is not None
            buffer = ShmRingBuffer.open(handle.buffer_handle)
            self._set_up(handle, buffer, None)
            self.local_reader_rank = handle.local_reader_ranks.index(rank)
            self._is_local_reader = True
            self._use(buffer.attach(self.local_reader_rank))
            return self
        if handle.remote_subscribe_addr is None:
            raise ProtocolError(
                f"rank {rank} is none of the queue's local readers {handle.local_reader_ranks}, "
                "and it has no remote ones"
            )
        remote = RemoteReader(handle.remote_subscribe_addr, handle.remote_addr_ipv6)
        self._set_up(handle, None, remote)
        self._is_remote_reader = True
        return self

    # ---- the meeting ----

    def wait_until_ready(self) -> None:
        """Wait until the writer and all readers are here. All of them have to call it."""
        if isinstance(self._ring, RingWriter):
            self._until(self._ring.core.wait_attached)
            self._ring.wait_attached(0)
            self._ring.announce_ready()
        if isinstance(self._remote, RemoteWriter):
            self._remote.wait_attached(None)
            self._remote.announce_ready()
        if isinstance(self._ring, RingReader):
            self._until(self._ring.core.wait_ready)
        if isinstance(self._remote, RemoteReader):
            self._remote.wait_ready(None)

    def _until(self, wait: Any) -> None:
        started = time.monotonic()
        assert self._ring is not None
        while (status := wait(self._interval)) == TIMEOUT:
            self._tell("has not come", time.monotonic() - started, self._ring.first_missing())
        self._ring.check(status)

    # ---- messages ----

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send `obj` to every reader; it may be changed as soon as this returns.

        Raises TimeoutError after `timeout` seconds without room; then no reader gets it.
        RuntimeError after `shutdown` and when a reader has died. What pickling raises leaves the
        queue as it was.
        """
        if not self._is_writer:
            raise RuntimeError("only the writer can enqueue")
        if self._owns_turn():
            raise RuntimeError(REENTERED)
        try:
            if not self._take_turn(False):
                timeout = self._wait_for_turn(timeout)
            record = self._encode(obj)
            if self._remote is not None:
                assert isinstance(self._remote, RemoteWriter)
                self._remote.send(record, timeout)
                timeout = None  # remote readers will get it, so local ones must
                if self._ring is None:
                    return
            is_long = timeout is None or timeout > self._interval
            wait = self._interval if is_long else timeout
            if status := self._core.write(record, wait, is_long, False):
                self._write_on(status, record, timeout)
        except BaseException:
            self._forget_step()
            raise
        finally:
            try:  # noqa: SIM105 - nothing may come between the end of the work and this call
                self._end_turn()
            except RuntimeError:  # it was never ours
                pass

    def _write_on(self, status: int, record: Record, timeout: float | None) -> None:
        """Go on after the first long wait: a line in the log after each."""
        for waited, step, is_last in next_steps(self._interval, self._interval, timeout):
            if status != TIMEOUT:
                break
            self._tell("has not read", waited)
            status = self._core.write(record, step, not is_last, True)
        assert self._ring is not None
        self._ring.check(status)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object, in memory of its own.

        `indefinite`: a long wait is nothing to write into the log. Raises TimeoutError after
        `timeout` seconds without one, RuntimeError after `shutdown` (once what is there has been
        read) and when the writer has died. What unpickling raises consumes the message.
        """
        if self._owns_turn():
            raise RuntimeError(REENTERED)
        if self._is_local_reader:
            try:
                if not self._take_turn(False):
                    timeout = self._wait_for_turn(timeout)
                wait = timeout
                if not indefinite and (timeout is None or timeout > self._interval):
                    wait = self._interval
                record = self._core.read(wait)
                if isinstance(record, int):
                    record = self._read_on(record, wait, timeout)
                message = self._decode(record)  # before another thread does with the next
            finally:
                try:  # noqa: SIM105 - as in enqueue
                    self._end_turn()
                except RuntimeError:
                    pass
            return message
        if not isinstance(self._remote, RemoteReader):
            raise RuntimeError("only a reader can dequeue")  # noqa: TRY004 - as vLLM's queue does
        try:
            if not self._take_turn(False):
                timeout = self._wait_for_turn(timeout)
            message = self._decode(self._remote.receive(timeout, indefinite))
        finally:
            try:  # noqa: SIM105 - as in enqueue
                self._end_turn()
            except RuntimeError:
                pass
        return message  # not above: a handler might raise between the value and the end of the turn

    def _wait_for_turn(self, timeout: float | None) -> float | None:
        """Take the turn from another thread; what of the timeout is left then."""
        started = time.monotonic()
        if not self._take_turn(True, -1 if timeout is None else min(max(timeout, 0), LONGEST)):
            raise CommextTimeoutError("another thread used this end all the time")
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - started))

    def _read_on(
        self, status: int, waited: float | None, timeout: float | None
    ) -> "bytes | list[bytes | bytearray]":
        record: bytes | list[bytes | bytearray] | int = status
        for so_far, step, _ in next_steps(waited, self._interval, timeout):
            if record != TIMEOUT:
                break
            self._tell("has not written", so_far)
            record = self._core.read(step)
        if isinstance(record, int):
            assert self._ring is not None
            self._ring.fail(record)
        return record

    def broadcast_object(self, obj: object = None) -> Any:
        """The writer sends `obj` and returns it, a reader returns what was sent."""
        if not self._is_writer:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    @contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[bytearray]:
        """Memory of `max_chunk_bytes` to fill; sent as it is when the block ends without error."""
        assert self._is_writer, "only a writer can"
        assert self.buffer is not None, "there are no local readers"
        memory = bytearray(self.buffer.max_chunk_bytes)
        yield memory
        with self._turn:
            wait = self._interval if timeout is None else min(timeout, self._interval)
            self._write_on(self._core.write((memory,), wait, True, False), (memory,), timeout)

    @contextmanager
    def acquire_read(
        self, timeout: float | None = None, indefinite: bool = False
    ) -> Iterator[memoryview]:
        """What `acquire_write` sent."""
        assert self._is_local_reader, "only a local reader can"
        is_short = timeout is not None and timeout < self._interval
        wait = timeout if indefinite or is_short else self._interval
        with self._turn:
            record = self._core.read(wait)
            if isinstance(record, int):
                record = self._read_on(record, wait, timeout)
        yield memoryview(record if isinstance(record, bytes) else record[0])

    @staticmethod
    def recv(socket: "zmq.Socket[bytes]", timeout: float | None) -> Any:
        """The next object from a remote reader's socket."""
        if not socket.poll(None if timeout is None else max(0, int(timeout * 1000))):
            raise TimeoutError
        _, parts = parse(socket.recv_multipart(copy=False), "the socket")
        return decode(parts)

    # ---- the end, and what can be observed ----

    def shutdown(self) -> None:
        """End every wait of this end, now and later. From any thread or signal handler."""
        first, self.shutting_down = not self.shutting_down, True
        if self._ring is not None:
            if first and (dead := self._ring.dead_peers()):
                names = ", ".join(map(str, dead))
                logger.error("queue %s is shut down; dead: %s", self._ring.address.name, names)
            self._ring.cancel()
        if self._remote is not None:
            self._remote.cancel()

    def counters(self) -> dict[str, int]:
        """For local traffic: see `RingEnd.counters`."""
        return self._ring.counters() if self._ring is not None else {}

    def _tell(self, what: str, seconds: float, who: Peer | None = None) -> None:
        """The line about a long wait, in place of vLLM's: first who is waited for."""
        assert self._ring is not None
        if who is None:
            who = self._ring.slowest_reader() if self._is_writer else self._ring.peers()[0]
        me = "the writer" if self._is_writer else f"reader {self.local_reader_rank}"
        logger.info(
            "%s %s for %.0f s, says %s of queue %s; all: %s; %s",
            *(who, what, seconds, me, self._ring.address.name),
            *(self._ring.describe_peers(), self._ring.counters()),
        )
