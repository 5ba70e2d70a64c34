"""The doorbell between workers and the engine, in this process and from another one."""

import gc
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
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
    ring = ringer(bell.address, "worker 0")
    thread, rung = wait_in_thread(bell, queue.Queue())
    ring()
    thread.join(BOUND_SECONDS / 2)
    assert rung == [True]


def test_a_ring_before_the_wait_is_not_lost(bell: Doorbell) -> None:
    ring = ringer(bell.address, "worker 0")
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
    code = f"from vllm_commext.nixl.doorbell import ringer; ringer({bell.address!r}, 'w')()"
    thread, rung = wait_in_thread(bell, queue.Queue())
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BOUND_SECONDS)
    thread.join(BOUND_SECONDS / 2)
    assert rung == [True]


def test_a_worker_that_cannot_ring_is_looked_after(
    bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    assert not bell.wait(queue.Queue())  # nobody has said that he can
    ring = ringer(bell.address, "worker 0")
    ring()
    while not bell.wait(queue.Queue()):
        time.sleep(0.001)
    thread, rung = wait_in_thread(bell, queue.Queue())
    ring()
    thread.join(BOUND_SECONDS / 2)
    assert rung == [True]


def test_a_doorbell_that_is_gone_is_not_missed(bell: Doorbell) -> None:
    ring = ringer(bell.address, "worker 0")
    bell.close()
    bell.close()
    ring()
    ringer("\0commext-nobody", "worker 0")()


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
        ring = ringer(bell.address, "worker 0")
        ring()
        del ring
        gc.collect()
    assert [str(one.message) for one in caught if "socket" in str(one.message)] == []
