"""The ring between processes: who dies is named, who is stopped is not dead, nothing remains.

The kernel says who is dead: after exec, in other pid namespaces, whatever children live on."""

import fcntl
import os
import resource
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from vllm_commext.errors import CommextTimeoutError
from vllm_commext.shm import ring
from vllm_commext.shm.ring import (
    PeerLostError,
    QueueCancelledError,
    RingAddress,
    RingReader,
    RingWriter,
)

from .conftest import Start, unshared

CAPACITY = 4096
F_OFD_SETLK = 37  # <linux/fcntl.h>; Python 3.10 has no name for it


NAMESPACE = ("-rpf", "--mount-proc", "--kill-child")
here_and_elsewhere = pytest.mark.parametrize(
    "namespaces", [(), NAMESPACE], ids=["here", "in a pid namespace"]
)


def beginning(namespaces: tuple[str, ...]) -> tuple[str, ...]:
    return unshared(*namespaces) if namespaces else ()


def in_dev_shm(address: RingAddress) -> bool:
    return (Path("/dev/shm") / address.name).exists()


def test_who_misses_its_writer_removes_what_that_has_left(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reader never came, so the writer's segment is still there; whoever creates the
    next one would remove it as well, in any process."""
    child = start("create_and_sleep", 2, CAPACITY)
    address = child.said()
    reader = RingReader.attach(address, 0)
    assert in_dev_shm(address)
    removed: list[str] = []
    unlink = ring.unlink_segment
    monkeypatch.setattr(ring, "unlink_segment", lambda name: [removed.append(name), unlink(name)])
    child.kill()
    with pytest.raises(PeerLostError, match="writer"):
        reader.read(timeout=60)
    assert removed == [address.name]
    assert not in_dev_shm(address)


def test_a_reader_killed_before_all_have_attached_is_noticed(start: Start) -> None:
    writer = RingWriter.create(2, CAPACITY)
    child = start("attach_and_sleep", writer.address, 0)
    assert child.said() == "attached"
    child.kill()
    with pytest.raises(PeerLostError, match=rf"reader 0 \(pid {child.pid}, dead"):
        writer.wait_attached(timeout=60)
    writer.close()


def test_a_cancelled_wait_names_the_dead(start: Start) -> None:
    child = start("create_and_sleep", 1, CAPACITY)
    reader = RingReader.attach(child.said(), 0)
    child.kill()
    reader.cancel()
    with pytest.raises(QueueCancelledError, match=rf"cancelled; writer \(pid {child.pid}, dead"):
        reader.read()


def test_a_stopped_writer_is_not_dead(start: Start) -> None:
    child = start("create_and_sleep", 1, CAPACITY)
    reader = RingReader.attach(child.said(), 0)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(CommextTimeoutError, match=r"alive"):
        reader.read(timeout=1.1)  # longer than the time between two looks
    os.kill(child.pid, signal.SIGCONT)


def is_found_dead(writer: RingWriter) -> None:
    with pytest.raises(PeerLostError, match=r"reader 0 \(pid \d+, dead, at message 0\) has died"):
        writer.write(b"x" * 2 * CAPACITY, timeout=60)


@pytest.mark.parametrize("end", ["attach_and_exec", "attach_and_fork", "attach_and_sleep"])
@here_and_elsewhere
def test_a_reader_is_dead_whatever_lives_on(
    end: str, namespaces: tuple[str, ...], start: Start
) -> None:
    """Another program in its process, and a child of it."""
    writer = RingWriter.create(1, CAPACITY)
    child = start(end, writer.address, 0, wrapper=beginning(namespaces))
    said = child.said()
    if end != "attach_and_exec":
        assert writer.dead_peers() == []
        child.process.kill()  # without its output's end, for which its own child would have to go
    is_found_dead(writer)
    if end == "attach_and_fork" and not namespaces:
        os.kill(said, 9)


@here_and_elsewhere
def test_what_a_dead_creator_left_is_removed_by_the_next(
    namespaces: tuple[str, ...], start: Start
) -> None:
    child = start("create_and_sleep", 1, CAPACITY, wrapper=beginning(namespaces))
    address, living = child.said(), RingWriter.create(1, CAPACITY)
    assert in_dev_shm(address)
    child.kill()
    deadline = time.monotonic() + 10
    while in_dev_shm(address) and time.monotonic() < deadline:  # a namespace's end after it
        RingWriter.create(1, CAPACITY).close()
    assert not in_dev_shm(address)
    assert in_dev_shm(living.address)
    living.close()
    assert not in_dev_shm(living.address)


def test_a_restored_reader_is_alive_whatever_its_pid_and_its_start(start: Start) -> None:
    """As a snapshot's restore leaves it: another process, which holds the lock through a
    description of its own. A reader was known by its pid and start time once, and was dead then."""
    writer = RingWriter.create(1, CAPACITY)
    file = os.open(f"/dev/shm/{writer.address.name}", os.O_RDWR)
    child = start("attach_and_sleep", writer.address, 0)
    assert child.said() == "attached"
    child.kill()
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1, 1, 0)  # byte 1: reader 0's
    fcntl.fcntl(file, F_OFD_SETLK, lock)
    restored = subprocess.Popen(["sleep", "60"], pass_fds=[file])
    os.close(file)
    assert writer.dead_peers() == []
    writer.write(b"a record", timeout=60)
    restored.kill()
    restored.wait(timeout=60)
    is_found_dead(writer)


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_without_a_free_descriptor_an_end_is_refused_and_not_taken_for_dead(spare: int) -> None:
    writer = RingWriter.create(1, CAPACITY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, hard))
    for fd in taken[:spare]:
        os.close(fd)
    reader, refused = None, ""
    try:
        reader = RingReader.attach(writer.address, 0)
    except OSError as error:
        refused = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken[spare:]:
            os.close(fd)
    if reader is None:
        assert spare < 2
        assert "Too many open files" in refused
        reader = RingReader.attach(writer.address, 0)
    assert writer.dead_peers() == reader.dead_peers() == []
    writer.write(b"x", timeout=60)
    assert reader.read(timeout=60) == b"x"
