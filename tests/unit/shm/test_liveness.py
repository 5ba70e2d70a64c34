"""The kernel says who is dead: after exec, in other pid namespaces, whatever children live on."""

import fcntl
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.shm.ring import PeerLostError, RingReader, RingWriter

from .conftest import CHILD

Child = subprocess.Popen[str]
Start = Callable[..., Child]
Said = Callable[[Child], str]
CAPACITY = 4096
F_OFD_SETLK = 37  # <linux/fcntl.h>; Python 3.10 has no name for it
IN_A_NAMESPACE = ("unshare", "-rpf", "--mount-proc", "--kill-child")


def in_a_pid_namespace(command: str, *arguments: object) -> Child:
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([*IN_A_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this machine does not let us make a pid namespace")
    words = [*IN_A_NAMESPACE, sys.executable, str(CHILD), command, pickle.dumps(arguments).hex()]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def is_found_dead(writer: RingWriter) -> None:
    with pytest.raises(PeerLostError, match=r"reader 0 \(pid \d+, dead, at message 0\) has died"):
        writer.write(b"x" * 2 * CAPACITY, timeout=60)


def test_a_reader_that_becomes_another_program_is_dead(start: Start, said: Said) -> None:
    writer = RingWriter.create(1, CAPACITY)
    child = start("attach_and_exec", writer.address, 0)
    assert [said(child), said(child)] == ["attached", "another program"]
    is_found_dead(writer)


def test_a_dead_readers_child_does_not_keep_it_alive(start: Start, said: Said) -> None:
    writer = RingWriter.create(1, CAPACITY)
    child = start("attach_and_fork", writer.address, 0)
    assert said(child) == "attached"
    grandchild = int(said(child))
    child.kill()
    child.wait(timeout=60)
    is_found_dead(writer)
    os.kill(grandchild, 9)


def test_a_reader_in_another_pid_namespace_is_looked_after(said: Said) -> None:
    writer = RingWriter.create(1, CAPACITY)
    child = in_a_pid_namespace("attach_and_sleep", writer.address, 0)
    assert said(child) == "attached"
    assert writer.dead_peers() == []
    child.kill()
    child.communicate(timeout=60)
    is_found_dead(writer)


def test_what_died_in_another_pid_namespace_is_removed(said: Said) -> None:
    child = in_a_pid_namespace("write_and_sleep", 1, CAPACITY, 0)
    path = Path("/dev/shm") / pickle.loads(bytes.fromhex(said(child))).name
    RingWriter.create(1, CAPACITY).close()
    assert path.exists()
    child.kill()
    child.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:  # the namespace's processes end after it
        RingWriter.create(1, CAPACITY).close()
    assert not path.exists()


def test_a_restored_reader_is_alive_whatever_its_pid_and_its_start(
    start: Start, said: Said
) -> None:
    """As a snapshot's restore leaves it: another process, which holds the lock through a
    description of its own. A reader was known by its pid and start time once, and was dead then."""
    writer = RingWriter.create(1, CAPACITY)
    file = os.open(f"/dev/shm/{writer.address.name}", os.O_RDWR)
    child = start("attach_and_sleep", writer.address, 0)
    assert said(child) == "attached"
    child.kill()
    child.wait(timeout=60)
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
