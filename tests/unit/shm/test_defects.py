"""What goes wrong in vLLM 0.32's queue, one test a defect.

    COMMEXT_TEST_QUEUE=vllm pytest tests/unit/shm/test_defects.py

runs the same tests against the installed vLLM's queue, where each of them fails."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.threads import in_thread

from .child import KIND, LARGE, SMALL, queue_class
from .conftest import Start, unshared

ENOUGH_SECONDS = 60.0  # for a wait that must end


def outcome(work: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> object:
    thread, results = in_thread(work)
    meanwhile()
    thread.join(ENOUGH_SECONDS)
    return results[0] if results else "it has not ended"


def local_pair(**options: Any) -> tuple[Any, Any]:
    writer = queue_class()(1, 1, **options)
    reader = queue_class().create_from_handle(writer.export_handle(), 0)
    ready, _ = in_thread(reader.wait_until_ready)
    writer.wait_until_ready()
    ready.join(ENOUGH_SECONDS)
    return writer, reader


def test_1_a_killed_reader_ends_the_wait_of_its_writer(start: Start) -> None:
    writer = queue_class()(1, 1, **SMALL)
    child = start("read_one_and_sleep", writer.export_handle())
    assert child.said() == "attached"
    writer.wait_until_ready()
    writer.enqueue("one")
    assert child.said() == "one"
    child.kill()

    def write() -> None:
        for _ in range(100):
            writer.enqueue(b"x" * 60_000)

    assert f"reader 0 (pid {child.pid}, dead" in str(outcome(write))


def test_2_shutdown_ends_the_wait_of_a_writer() -> None:
    writer, _reader = local_pair(**SMALL)

    def write() -> None:
        for _ in range(100):
            writer.enqueue(b"x" * 60_000)

    def shut_down() -> None:
        time.sleep(0.3)
        writer.shutdown()

    result = outcome(write, meanwhile=shut_down)
    assert isinstance(result, RuntimeError)
    assert str(result) == "cancelled"


def test_3_a_large_message_that_takes_long_is_not_lost(start: Start) -> None:
    child = start("write_large_slowly", False)
    reader = queue_class().create_from_handle(child.said(), 0)
    reader.wait_until_ready()
    if KIND == "ours":
        assert child.said() == "waits"  # in the midst of the message
        os.kill(child.pid, signal.SIGSTOP)
        assert reader.dequeue(timeout=60) == LARGE  # there is another one
    for _ in range(2):
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.2)
    os.kill(child.pid, signal.SIGCONT)
    assert [reader.dequeue(timeout=60) for _ in range(2)] == [LARGE, "small"]


def test_4_a_writer_that_dies_in_a_large_message_is_named(start: Start) -> None:
    child = start("write_large_slowly", True)
    reader = queue_class().create_from_handle(child.said(), 0)
    reader.wait_until_ready()
    if KIND == "ours":
        assert child.said() == "waits"
        child.kill()
        assert reader.dequeue(timeout=60) == LARGE  # there was another one
    assert f"writer (pid {child.pid}, dead" in str(outcome(reader.dequeue))


def test_5_the_content_is_that_of_the_call() -> None:
    writer, reader = local_pair(**SMALL)
    corrupted = 0

    def write() -> None:
        array = np.empty(2 << 20, dtype=np.uint8)
        for number in range(10):
            array[:] = number
            writer.enqueue(array)
            array[:] = 255

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    for number in range(10):
        corrupted += bool((reader.dequeue(timeout=60) != number).any())
    assert corrupted == 0


@pytest.mark.parametrize("size", ["64m", "1m"])
def test_6_a_small_dev_shm_holds_all_queues(size: str, start: Start) -> None:
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"'
    child = start("fill_a_small_dev_shm", wrapper=(*unshared("-rm"), "sh", "-c", mount))
    assert child.said() == "done"


def test_7_a_busy_reader_does_not_grow(start: Start) -> None:
    writer = queue_class()(1, 1)
    child = start("read_and_answer", writer.export_handle())
    assert child.said() == "attached"
    writer.wait_until_ready()
    pages = []
    for _ in range(4):
        for number in range(100_000):
            writer.enqueue(number, timeout=60)
        writer.enqueue("how large?", timeout=60)
        pages.append(child.said())
    assert (pages[3] - pages[0]) * os.sysconf("SC_PAGE_SIZE") < 100_000


def test_8_a_forked_child_changes_nothing() -> None:
    writer = queue_class()(1, 1)
    pid = os.fork()
    if pid == 0:
        del writer
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    reader = queue_class().create_from_handle(writer.export_handle(), 0)
    writer.enqueue("still there")
    assert reader.dequeue(timeout=60) == "still there"


def test_9_a_killed_creator_leaves_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    child = start("write_a_queue_and_sleep", str(tmp_path))
    reader = queue_class().create_from_handle(child.said(), 0)
    reader.wait_until_ready()
    assert reader.dequeue(timeout=60) == "hello"
    segments, files = child.said()
    assert segments
    child.kill()
    left = [name for name in segments if Path(name.removesuffix(" (deleted)")).exists()]
    assert left + [name for name in files if (tmp_path / name).exists()] == []
