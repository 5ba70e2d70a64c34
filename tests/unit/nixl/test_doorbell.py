"""The doorbell between workers and the engine, in this process and from another one."""

import gc
import os
import queue
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.nixl import doorbell as module
from vllm_commext.nixl.doorbell import Doorbell, ringer
from vllm_commext.nixl.outcomes import OutcomeBox

BOUND_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _only_a_ring_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that a ring or an arrival does not end shows in these tests."""
    monkeypatch.setattr(module, "MAX_WAIT_SECONDS", BOUND_SECONDS)
    monkeypatch.setattr(module, "LOOK_SECONDS", BOUND_SECONDS)


@pytest.fixture(name="bell")
def _bell() -> Iterator[Doorbell]:
    bell = Doorbell(num_workers=1)
    yield bell
    bell.close()


def wait_in_thread(
    bell: Doorbell, arrivals: queue.Queue[Any]
) -> tuple[threading.Thread, list[bool]]:
    rung: list[bool] = []
    thread = threading.Thread(target=lambda: rung.append(bell.wait(arrivals)))
    thread.start()
    return thread, rung


def test_a_ring_ends_the_wait(bell: Doorbell) -> None:
    ring = ringer(bell.address, 0)
    thread, rung = wait_in_thread(bell, queue.Queue())
    ring()
    thread.join(BOUND_SECONDS / 2)
    assert rung == [True]


def test_a_ring_before_the_wait_is_not_lost(bell: Doorbell) -> None:
    ring = ringer(bell.address, 0)
    ring()
    assert bell.wait(queue.Queue())


def test_what_arrives_ends_the_wait_and_stays_in_the_queue(bell: Doorbell) -> None:
    arrivals: queue.Queue[str] = queue.Queue()
    thread, rung = wait_in_thread(bell, arrivals)
    arrivals.put("request")
    thread.join(BOUND_SECONDS / 2)
    assert rung == [False]
    assert arrivals.get_nowait() == "request"


def test_another_process_rings(bell: Doorbell) -> None:
    code = f"from vllm_commext.nixl.doorbell import ringer; ringer({bell.address!r}, 0)()"
    thread, rung = wait_in_thread(bell, queue.Queue())
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BOUND_SECONDS)
    thread.join(BOUND_SECONDS / 2)
    assert rung == [True]


def test_a_worker_that_cannot_ring_is_looked_after(
    bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    assert not bell.wait(queue.Queue())  # nobody has said that he can
    ring = ringer(bell.address, 0)
    ring()
    while not bell.wait(queue.Queue()):
        time.sleep(0.001)
    thread, rung = wait_in_thread(bell, queue.Queue())
    ring()
    thread.join(BOUND_SECONDS / 2)
    assert rung == [True]


def test_a_doorbell_that_is_gone_is_not_missed(bell: Doorbell) -> None:
    ring = ringer(bell.address, 0)
    bell.close()
    bell.close()
    ring()
    ringer("/nowhere/commext", 0)()
    ringer("\0commext-nobody", 0)()


@pytest.mark.parametrize(
    "said", [b"1", b"-1", b"00", b"worker 0", b"close", b"\xff" * 64, b"x" * 9]
)
def test_who_is_no_worker_does_not_count_and_commands_nothing(bell: Doorbell, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.connect(bell.address)
        for _ in range(100):
            other.send(said)
        ring_until_heard(bell, other)
    assert bell._missing == {b"0"}
    assert bell._thread.is_alive()
    assert Path(bell.address).exists()


def ring_until_heard(bell: Doorbell, other: socket.socket) -> None:
    """Everything before has been heard as well then."""
    before = bell._num_rings
    other.send(b"")
    end = time.monotonic() + BOUND_SECONDS
    while bell._num_rings == before:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_folder_is_this_users_alone_and_gone_when_all_have_connected() -> None:
    bell = Doorbell(num_workers=2)
    folder = Path(bell.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first, second = ringer(bell.address, 0), None
    first()
    assert bell.wait(queue.Queue())
    assert folder.exists()
    second = ringer(bell.address, 1)
    end = time.monotonic() + BOUND_SECONDS
    while folder.exists():
        assert time.monotonic() < end
        time.sleep(0.001)
    for ring in (first, second):
        ring()
        assert bell.wait(queue.Queue())
    bell.close()


def test_a_doorbell_that_nobody_came_to_leaves_nothing() -> None:
    bell = Doorbell(num_workers=2)
    folder = Path(bell.address).parent
    bell.close()
    assert not folder.exists()
    left = Doorbell(num_workers=1)
    code = "from vllm_commext.nixl.doorbell import Doorbell; print(Doorbell(1).address)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not Path(done.stdout.strip()).parent.exists()
    left.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root can")
def test_another_user_neither_enters_nor_rings(bell: Doorbell) -> None:
    code = f"""
import os, socket
from pathlib import Path
os.setgroups([]); os.setgid(65534); os.setuid(65534)
names = Path("/proc/net/unix").read_text()
assert "@commext-{os.getpid()}-" not in names
refused = 0
for act in (
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"close", {bell.address!r}),
    lambda: os.listdir({str(Path(bell.address).parent)!r}),
    lambda: os.unlink({bell.address!r}),
    lambda: os.rename({str(Path(bell.address).parent)!r}, "/tmp/commext-taken"),
    lambda: os.open("/proc/{os.getpid()}/fd/{bell._socket.fileno()}", os.O_WRONLY),
):
    try:
        act()
    except OSError:
        refused += 1
print(refused)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "5"
    assert bell._num_rings == 0
    assert bell._thread.is_alive()


def test_without_a_place_for_it_nobody_rings_and_it_is_looked_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "mkdtemp", full)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    bell = Doorbell(num_workers=1)
    assert bell.address == ""
    assert not bell.wait(queue.Queue())
    bell.ring()
    assert bell.wait(queue.Queue())
    bell.close()


def test_a_long_temporary_folder_is_no_reason_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(deep))
    bell = Doorbell(num_workers=1)
    ringer(bell.address, 0)()
    assert bell.wait(queue.Queue())
    bell.close()
    assert list(deep.iterdir()) == []


def test_the_box_rings_once_until_it_is_emptied() -> None:
    rings: list[int] = []
    box = OutcomeBox()
    box.on_first = lambda: rings.append(1)
    box.sent("a")
    box.received("b", failed=True)
    assert len(rings) == 1
    assert box.take().failed == {"b"}
    box.late("c")
    assert len(rings) == 2
    assert box.take().late == {"c"}


def test_an_outcome_is_there_although_its_ring_failed(log_lines: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("no bell")

    box = OutcomeBox()
    box.on_first = broken
    box.sent("a")
    box.sent("b")
    assert box.take().sent == {"a", "b"}
    assert [line for line in log_lines.messages if "no bell" in line]


def test_a_ringers_socket_closes_with_its_last_user(bell: Doorbell) -> None:
    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        ring = ringer(bell.address, 0)
        ring()
        del ring
        gc.collect()
    assert [str(one.message) for one in caught if "socket" in str(one.message)] == []
