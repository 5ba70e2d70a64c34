"""The ring between processes: who dies is named, who is stopped is not dead, nothing remains."""

import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.errors import CommextTimeoutError
from vllm_commext.shm import ring
from vllm_commext.shm.ring import (
    PeerLostError,
    QueueCancelledError,
    RingAddress,
    RingReader,
    RingWriter,
)

from .child import pattern

Child = subprocess.Popen[str]
Start = Callable[..., Child]
Said = Callable[[Child], str]
CAPACITY = 4096


def in_dev_shm(address: RingAddress) -> bool:
    return (Path("/dev/shm") / address.name).exists()


def test_a_killed_writer_is_named_after_its_last_record(start: Start, said: Said) -> None:
    child = start("write_and_sleep", 1, CAPACITY, 3)
    address = pickle.loads(bytes.fromhex(said(child)))
    reader = RingReader.attach(address, 0)
    assert not in_dev_shm(address)
    assert said(child) == "written"
    child.kill()
    child.wait(timeout=60)
    assert [reader.read(timeout=60) for _ in range(3)] == [pattern(n) for n in range(3)]
    with pytest.raises(PeerLostError, match=rf"writer \(pid {child.pid}, dead, at message 3\)"):
        reader.read(timeout=60)


def test_who_misses_its_writer_removes_what_that_has_left(
    start: Start, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reader never came, so the writer's segment is still there; whoever creates the
    next one would remove it as well, in any process."""
    child = start("write_and_sleep", 2, CAPACITY, 0)
    address = pickle.loads(bytes.fromhex(said(child)))
    reader = RingReader.attach(address, 0)
    assert in_dev_shm(address)
    removed: list[str] = []
    unlink = ring.unlink_segment
    monkeypatch.setattr(ring, "unlink_segment", lambda name: [removed.append(name), unlink(name)])
    child.kill()
    child.wait(timeout=60)
    with pytest.raises(PeerLostError, match="writer"):
        reader.read(timeout=60)
    assert removed == [address.name]
    assert not in_dev_shm(address)


def test_a_writer_killed_while_a_reader_sleeps_is_noticed(start: Start, said: Said) -> None:
    child = start("write_and_sleep", 1, CAPACITY, 0)
    reader = RingReader.attach(pickle.loads(bytes.fromhex(said(child))), 0)
    assert said(child) == "written"
    with pytest.raises(CommextTimeoutError):
        reader.read(timeout=0.01)  # also: the writer has been looked at, and found alive
    child.kill()  # not waited for: a zombie has died as well
    with pytest.raises(PeerLostError, match="has died"):
        reader.read(timeout=60)


def test_a_reader_killed_before_all_have_attached_is_noticed(start: Start, said: Said) -> None:
    writer = RingWriter.create(2, CAPACITY)
    child = start("attach_and_sleep", writer.address, 0)
    assert said(child) == "attached"
    child.kill()
    child.wait(timeout=60)
    with pytest.raises(PeerLostError, match=rf"reader 0 \(pid {child.pid}, dead"):
        writer.wait_attached(timeout=60)
    writer.close()


def test_a_cancelled_wait_names_the_dead(start: Start, said: Said) -> None:
    child = start("write_and_sleep", 1, CAPACITY, 0)
    reader = RingReader.attach(pickle.loads(bytes.fromhex(said(child))), 0)
    child.kill()
    child.wait(timeout=60)
    reader.cancel()
    with pytest.raises(QueueCancelledError, match=rf"cancelled; writer \(pid {child.pid}, dead"):
        reader.read()


def test_a_stopped_writer_is_not_dead(start: Start, said: Said) -> None:
    child = start("write_and_sleep", 1, CAPACITY, 0)
    reader = RingReader.attach(pickle.loads(bytes.fromhex(said(child))), 0)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(CommextTimeoutError, match=r"alive"):
        reader.read(timeout=1.1)  # longer than the time between two looks
    os.kill(child.pid, signal.SIGCONT)


def test_a_signal_handler_that_raises_ends_a_wait(start: Start, said: Said) -> None:
    writer = RingWriter.create(1, CAPACITY)
    child = start("interrupt_reading", writer.address, 0)
    assert said(child) == "attached"
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGUSR1)
    assert said(child) == "interrupted"
    writer.write(b"after", timeout=60)
    assert said(child) == "b'after'"


def test_what_a_dead_creator_left_is_removed_by_the_next(start: Start, said: Said) -> None:
    child = start("write_and_sleep", 1, CAPACITY, 0)
    address = pickle.loads(bytes.fromhex(said(child)))
    living = RingWriter.create(1, CAPACITY)
    assert in_dev_shm(address)
    child.kill()
    child.wait(timeout=60)
    RingWriter.create(1, CAPACITY).close()
    assert not in_dev_shm(address)
    assert in_dev_shm(living.address)
    living.close()
    assert not in_dev_shm(living.address)
