"""A byte ring in shared memory: one writer, N readers, each of whom gets every record once.

A record is one or more parts; a part is the content of any contiguous buffer at the time of
`write`. It may be longer than the ring: then it is streamed through it while readers read. Every
wait first spins for some microseconds if messages come that often, then sleeps in the kernel with
the interpreter's lock released, and ends with the data, the timeout, `cancel`, a signal whose
handler raises, or the peer's death.

    writer = RingWriter.create(n_readers=2, capacity_bytes=1 << 20)
    reader = RingReader.attach(writer.address, rank=0)  # in another process
    writer.write(b"some bytes", timeout=1.0)
    reader.read(timeout=1.0)

An end may be used by any thread, but only by one at a time, and only in the process that opened
it. `cancel`, `close` and everything that observes may be called at any time.
"""

import os
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from ..errors import CommextError, CommextTimeoutError, ProtocolError
from . import _shm_ring
from .segment import Segment, create_segment, open_segment, segment_bytes, unlink_segment

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PeerLostError(CommextError, RuntimeError):
    """The other end has died or shut down."""


class QueueCancelledError(CommextError, RuntimeError):
    """This end was shut down, by another thread or a signal handler."""


def warning_interval() -> float:
    """Seconds after which, and between, the lines about a long wait."""
    return float(os.environ.get("VLLM_RINGBUFFER_WARNING_INTERVAL", "60"))


def next_steps(
    waited: float | None, interval: float, limit: float | None
) -> Iterator[tuple[float, float, bool]]:
    """Yield what follows on a wait in vain: how long it has been, how long to go on, and whether
    that is the last time.

    All in seconds. ``waited``: so far; None for ever, then nothing follows. ``interval``: the
    longest step. ``limit``: of the whole wait, None for none."""
    while waited is not None and (limit is None or waited < limit):
        step = interval if limit is None else min(interval, limit - waited)
        is_last = limit is not None and waited + step >= limit
        yield waited, step, is_last
        waited += step


WRITER = -1
OK, TIMEOUT, CANCELLED, PEER_DEAD, PEER_CLOSED, CORRUPT = range(6)
NOT_ATTACHED, ATTACHING, ATTACHED, SHUT_DOWN = range(4)
STATE_NAMES = ("not attached", "attaching", "attached", "shut down")


@dataclass(frozen=True)
class RingAddress:
    """Lets a reader attach. Picklable; of use on the writer's host only."""

    name: str
    nonce: bytes  # 16, repeated in the segment, so that those that do not belong together show
    capacity_bytes: int
    n_readers: int
    version: int = _shm_ring.VERSION


@dataclass(frozen=True)
class Peer:
    """One end as anybody sees it. `rank` is -1 for the writer.

    `sequence`: records written or read to the end; `position`: the same in bytes of the ring,
    headers and what was skipped included; `high_water_bytes`: the most that this reader ever found
    waiting."""

    rank: int
    state: int
    pid: int
    alive: bool
    sequence: int
    position: int
    high_water_bytes: int

    def __str__(self) -> str:
        who = "writer" if self.rank == WRITER else f"reader {self.rank}"
        if self.state >= len(STATE_NAMES):
            return f"{who} (damaged)"
        if self.state != ATTACHED:
            return f"{who} ({STATE_NAMES[self.state]}, at message {self.sequence})"
        alive = "alive" if self.alive else "dead"
        return f"{who} (pid {self.pid}, {alive}, at message {self.sequence})"


class RingEnd:
    def __init__(self, core: _shm_ring.Ring, address: RingAddress) -> None:
        self.core = core
        self.address = address

    def peers(self) -> list[Peer]:
        return [Peer(*fields) for fields in self.core.peers()]

    def slowest_reader(self) -> Peer:
        return min(self.peers()[1:], key=lambda peer: peer.position)

    def first_missing(self) -> Peer | None:
        return next((peer for peer in self.peers() if peer.state < ATTACHED), None)

    def dead_peers(self) -> list[Peer]:
        """Ends whose process has gone without a farewell."""
        return [peer for peer in self.peers() if peer.state == ATTACHED and not peer.alive]

    def counters(self) -> dict[str, int]:
        """Counters of this end: messages, bytes (headers not included), waits, sleeps (waits that
        slept), wake_ups (system calls that woke others), foreseen (waits that ended while their end
        was expected), spilled_bytes (that went beyond the ring because a reader was busy). Of the
        queue: high_water_bytes (the most that any reader ever found waiting), slowest_reader (its
        rank). Empty in a forked child."""
        return self.core.counters()

    def cancel(self) -> None:
        """End the wait in progress and every later one with QueueCancelledError, from any thread or
        signal handler. A reader still gets what is there already."""
        self.core.cancel()

    def close(self) -> None:
        """Cancel, and tell the other ends that this one will not come back."""
        self.core.cancel()
        self.core.leave()

    def check(self, status: int) -> None:
        if status != OK:
            self.fail(status)

    def fail(self, status: int) -> NoReturn:
        if status == TIMEOUT:
            raise CommextTimeoutError(f"nothing within the timeout; {self.describe_peers()}")
        if status == CANCELLED:
            raise QueueCancelledError("; ".join(["cancelled", *map(str, self.dead_peers())]))
        culprit, why = self.core.failure()
        if status == CORRUPT:
            raise ProtocolError(
                f"the queue's shared memory is damaged: {why}. Something else has written to "
                f"segment {self.address.name}; restart the processes that use it"
            )
        if culprit == WRITER:
            unlink_segment(self.address.name)  # it will not do so itself, if others never attached
        what = "has died" if status == PEER_DEAD else "has shut down its end"
        raise PeerLostError(
            f"{self.peers()[culprit + 1]} {what}; the queue cannot go on without it: "
            "see that process's log, and restart"
        )

    def describe_peers(self) -> str:
        return ", ".join(str(peer) for peer in self.peers())


class RingWriter(RingEnd):
    """The writing end. Make it with `create`."""

    @classmethod
    def create(cls, n_readers: int, capacity_bytes: int, budget_bytes: int = 0) -> "RingWriter":
        """Make a ring of `capacity_bytes` (a power of two, 4 KiB to 1 GiB), reserved at once;
        MemoryError if /dev/shm has no room.

        `budget_bytes` may be under way beyond that, in memory that is taken when readers are busy;
        a longer record goes alone. Without it the writer waits for room."""
        num_bytes, nonce = segment_bytes(capacity_bytes, n_readers), secrets.token_bytes(16)
        segment = create_segment(num_bytes)
        try:
            core = _open(segment, capacity_bytes, n_readers, WRITER, nonce, budget_bytes)
        except BaseException:
            unlink_segment(segment.name)
            raise
        return cls(core, RingAddress(segment.name, nonce, capacity_bytes, n_readers))

    def __init__(self, core: _shm_ring.Ring, address: RingAddress) -> None:
        super().__init__(core, address)
        self._unlink = weakref.finalize(self, _unlink_if_owner, address.name, os.getpid())

    def write(self, parts: "Buffer | tuple[Buffer, ...]", timeout: float | None = None) -> None:
        """Write one record: a buffer, or a tuple of up to 1024 of them (128 bytes of ring each).

        Returns as soon as all of it is in the ring: at once if there is room, else as readers make
        room, or, within the budget, after a moment in which they do not. If it raises, no reader
        gets any of it and the ring stays in order.
        """
        self.check(self.core.write(parts, timeout, False, False))

    def wait_attached(self, timeout: float | None = None) -> None:
        """Wait until every reader has attached; then nothing of the ring remains in /dev/shm."""
        self.check(self.core.wait_attached(timeout))
        self._unlink()

    def announce_ready(self) -> None:
        """Let every reader's `wait_ready` return, now or when it is called."""
        self.core.announce_ready()

    def close(self) -> None:
        super().close()
        self._unlink()


class RingReader(RingEnd):
    """A reading end. Make it with `attach`."""

    @classmethod
    def attach(cls, address: RingAddress, rank: int) -> "RingReader":
        """Take the place of reader `rank` (0 to n_readers - 1), once.

        Raises ProtocolError if the segment is not what the address says, or the place is taken.
        """
        if address.version != _shm_ring.VERSION:
            raise ProtocolError(
                f"the writer's queue has layout version {address.version}, this process's "
                f"{_shm_ring.VERSION}: install the same vllm-commext in both"
            )
        if not 0 <= rank < address.n_readers:
            raise ProtocolError(f"rank: expected 0 to {address.n_readers - 1}, got {rank}")
        try:
            num_bytes = segment_bytes(address.capacity_bytes, address.n_readers)
            segment = open_segment(address.name, num_bytes)
            core = _open(segment, address.capacity_bytes, address.n_readers, rank, address.nonce)
        except FileNotFoundError as error:
            raise ProtocolError(
                f"segment {address.name} does not exist: its writer has gone, or all "
                f"{address.n_readers} readers have attached already, or this is another host"
            ) from error
        except ValueError as error:
            raise ProtocolError(
                f"cannot attach reader {rank} to {address.name}: {error}"
            ) from error
        reader = cls(core, address)
        if all(peer.state in (ATTACHED, SHUT_DOWN) for peer in reader.peers()):
            unlink_segment(address.name)
        return reader

    def read(self, timeout: float | None = None) -> "bytes | list[bytes | bytearray]":
        """Return the next record: `bytes` if it has one part, else a list with `bytes` for each
        part that was `bytes` and an owned `bytearray` for any other.

        If it raises, nothing is lost: the next call goes on where this one was."""
        record = self.core.read(timeout)
        if isinstance(record, int):
            self.fail(record)
        return record

    def wait_ready(self, timeout: float | None = None) -> None:
        self.check(self.core.wait_ready(timeout))


def _open(
    segment: Segment, capacity_bytes: int, n_readers: int, rank: int, nonce: bytes, budget: int = 0
) -> _shm_ring.Ring:
    shape = segment.num_bytes, capacity_bytes, n_readers
    try:
        return _shm_ring.Ring(segment.fd, *shape, rank, nonce, budget)
    finally:
        os.close(segment.fd)


def _unlink_if_owner(name: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not in a forked child that drops its copy
        unlink_segment(name)
