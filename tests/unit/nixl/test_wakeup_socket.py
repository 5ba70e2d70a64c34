"""The wakeup socket between workers and the engine, in this process and from another one."""

import gc
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

from vllm_commext.nixl import wakeup as module
from vllm_commext.nixl.requests import CompletionQueue, FailedLoad
from vllm_commext.nixl.wakeup import WakeupSocket, notifier

BOUND_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _only_a_ring_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that a notification or an arrival does not end shows in these tests."""
    monkeypatch.setattr(module, "MAX_WAIT_SECONDS", BOUND_SECONDS)
    monkeypatch.setattr(module, "LOOK_SECONDS", BOUND_SECONDS)


@pytest.fixture(name="wakeup")
def _wakeup() -> Iterator[WakeupSocket]:
    wakeup = WakeupSocket(num_workers=1)
    yield wakeup
    wakeup.close()


def wait_in_thread(
    wakeup: WakeupSocket, arrivals: queue.Queue[Any]
) -> tuple[threading.Thread, list[bool]]:
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(wakeup.wait(arrivals)))
    thread.start()
    return thread, woken


def test_what_arrives_ends_the_wait_and_stays_in_the_queue(wakeup: WakeupSocket) -> None:
    arrivals: queue.Queue[str] = queue.Queue()
    thread, woken = wait_in_thread(wakeup, arrivals)
    arrivals.put("request")
    thread.join(BOUND_SECONDS / 2)
    assert woken == [False]
    assert arrivals.get_nowait() == "request"


def test_another_process_notifies(wakeup: WakeupSocket) -> None:
    code = f"from vllm_commext.nixl.wakeup import notifier; notifier({wakeup.address!r}, 0)()"
    thread, woken = wait_in_thread(wakeup, queue.Queue())
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BOUND_SECONDS)
    thread.join(BOUND_SECONDS / 2)
    assert woken == [True]


def test_a_worker_that_cannot_ring_is_looked_after(
    wakeup: WakeupSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    assert not wakeup.wait(queue.Queue())  # nobody has said that he can
    notify = notifier(wakeup.address, 0)
    notify()
    while not wakeup.wait(queue.Queue()):
        time.sleep(0.001)
    thread, woken = wait_in_thread(wakeup, queue.Queue())
    notify()
    thread.join(BOUND_SECONDS / 2)
    assert woken == [True]


def test_a_socket_that_is_gone_is_not_missed(wakeup: WakeupSocket) -> None:
    notify = notifier(wakeup.address, 0)
    wakeup.close()
    wakeup.close()
    notify()
    notifier("/nowhere/commext", 0)()
    notifier("\0commext-nobody", 0)()


@pytest.mark.parametrize(
    "said", [b"1", b"-1", b"00", b"worker 0", b"close", b"\xff" * 64, b"x" * 9]
)
def test_who_is_no_worker_does_not_count_and_commands_nothing(
    wakeup: WakeupSocket, said: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.connect(wakeup.address)
        for _ in range(100):
            other.send(said)
        notify_until_heard(wakeup, other)
    assert wakeup._missing == {b"0"}
    assert wakeup._thread.is_alive()
    assert Path(wakeup.address).exists()


def notify_until_heard(wakeup: WakeupSocket, other: socket.socket) -> None:
    """Everything before has been heard as well then."""
    before = wakeup._num_notifications
    other.send(b"")
    end = time.monotonic() + BOUND_SECONDS
    while wakeup._num_notifications == before:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_folder_is_this_users_alone_and_gone_when_all_have_connected() -> None:
    wakeup = WakeupSocket(num_workers=2)
    folder = Path(wakeup.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first, second = notifier(wakeup.address, 0), None
    first()
    assert wakeup.wait(queue.Queue())
    assert folder.exists()
    second = notifier(wakeup.address, 1)
    end = time.monotonic() + BOUND_SECONDS
    while folder.exists():
        assert time.monotonic() < end
        time.sleep(0.001)
    for notify in (first, second):
        notify()
        assert wakeup.wait(queue.Queue())
    wakeup.close()


def test_a_socket_that_nobody_came_to_leaves_nothing() -> None:
    wakeup = WakeupSocket(num_workers=2)
    folder = Path(wakeup.address).parent
    wakeup.close()
    assert not folder.exists()
    left = WakeupSocket(num_workers=1)
    code = "from vllm_commext.nixl.wakeup import WakeupSocket; print(WakeupSocket(1).address)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not Path(done.stdout.strip()).parent.exists()
    left.close()


def test_without_a_place_for_it_nobody_rings_and_it_is_looked_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "mkdtemp", full)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    wakeup = WakeupSocket(num_workers=1)
    assert wakeup.address == ""
    assert not wakeup.wait(queue.Queue())
    wakeup.notify()
    assert wakeup.wait(queue.Queue())
    wakeup.close()


def test_a_long_temporary_folder_is_no_reason_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(module.tempfile, "tempdir", str(deep))
    wakeup = WakeupSocket(num_workers=1)
    notifier(wakeup.address, 0)()
    assert wakeup.wait(queue.Queue())
    wakeup.close()
    assert list(deep.iterdir()) == []


def test_the_box_rings_once_until_it_is_emptied() -> None:
    notifications: list[int] = []
    completions = CompletionQueue()
    completions.on_first = lambda: notifications.append(1)
    completions.note("a", "sent")
    completions.note("b", "received", failure=FailedLoad("timeout"))
    assert len(notifications) == 1
    assert completions.take().failed == {"b": FailedLoad("timeout")}
    completions.note("c", "late")
    assert len(notifications) == 2
    assert completions.take().late == {"c"}


def test_an_outcome_is_there_although_its_ring_failed(log_lines: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("no wakeup")

    completions = CompletionQueue()
    completions.on_first = broken
    completions.note("a", "sent")
    completions.note("b", "sent")
    assert completions.take().sent == {"a", "b"}
    assert [line for line in log_lines.messages if "no wakeup" in line]


def test_a_notifiers_socket_closes_with_its_last_user(wakeup: WakeupSocket) -> None:
    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        notify = notifier(wakeup.address, 0)
        notify()
        del notify
        gc.collect()
    assert [str(one.message) for one in caught if "socket" in str(one.message)] == []
