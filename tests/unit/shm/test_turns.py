"""One end between threads and signal handlers: whoever gives up leaves it as it was."""

import dis
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from vllm_commext.shm.codec import StepClasses
from vllm_commext.shm.queue import MessageQueue, Reader, Writer

from .test_steps import CLASSES, exactly, step

# Where CPython runs signal handlers within a function: after these.
AFTER = ("CALL", "RESUME", "JUMP_BACKWARD")


class Raised(Exception):
    pass


def raising_after(code: Any, count: int) -> Callable[..., Any]:
    """A trace function that raises at the `count`th place of `code` where a handler may run."""
    names = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
    last, seen = "", 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal last, seen
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, last = last, names.get(frame.f_lasti, "")
            if before.startswith(AFTER):
                seen += 1
                if seen == count:
                    raise Raised
        return trace

    return trace


def is_free(queue: MessageQueue, work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_a_handler_that_raises_at_any_point_leaves_the_end_free(end: str) -> None:
    tried = 0
    for count in range(1, 100):
        writer = MessageQueue(1, 1, max_chunk_bytes=1024, max_chunks=2)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        writer.enqueue("first")
        queue = writer if end == "writer" else reader
        work = partial(writer.enqueue, "x", 1) if end == "writer" else partial(reader.dequeue, 0)
        before = sys.gettrace()
        method = Writer.enqueue if end == "writer" else Reader.dequeue
        sys._getframe().f_trace_opcodes = True  # Python 3.12 wants to know of some before it traces
        try:
            sys.settrace(raising_after(method.__code__, count))
            work()
        except Raised:
            tried += 1
        else:
            break
        finally:
            sys.settrace(before)
        writer.enqueue("second")
        assert is_free(queue, work), f"the end is held after place {count}"
    assert tried > 3


def test_who_does_not_get_the_turn_changes_nothing_of_the_steps() -> None:
    """The names that readers have are forgotten for a message that was not sent, not for another
    thread's that is being sent."""
    writer = StepQueue(1, 1, max_chunk_bytes=16 << 10, max_chunks=1)
    reader = StepQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(step(100))
    reader.dequeue(timeout=60)
    writer.enqueue(b"as much as may be under way" * 4000)
    first = threading.Thread(target=writer.enqueue, args=(step(100), 20), daemon=True)
    first.start()
    while not writer.counters()["waits"]:
        pass
    with pytest.raises(TimeoutError, match="another thread"):
        writer.enqueue("second", timeout=0.05)
    reader.dequeue(timeout=60)
    assert exactly(reader.dequeue(timeout=60)) == exactly(step(100))
    first.join(5)
    before = writer.counters()["bytes"]
    writer.enqueue(step(100))
    assert writer.counters()["bytes"] - before < 1500  # without the names
    assert exactly(reader.dequeue(timeout=60)) == exactly(step(100))


class StepQueue(MessageQueue):
    """A queue whose steps go field by field."""

    @staticmethod
    def step_classes() -> StepClasses:
        return CLASSES


def while_unpickling() -> str:
    """Give another thread the time to take the next message while this one is being unpickled."""
    second_reader.start()
    second_reader.join(0.5)
    return "unpickled"


class Slow:
    def __reduce__(self) -> Any:
        return while_unpickling, ()


second_reader = threading.Thread()


def test_two_threads_read_steps_in_their_order() -> None:
    global second_reader  # noqa: PLW0603 - what is unpickled can only be told by a name
    writer = StepQueue(1, 1, max_chunk_bytes=1024, max_chunks=2)
    reader = StepQueue.create_from_handle(writer.export_handle(), 0)
    messages = [step(3), step(4)]
    messages[0][1][0].connector_metadata = Slow()
    for message in messages:
        writer.enqueue(message)
    got: list[Any] = []
    second_reader = threading.Thread(target=lambda: got.append(reader.dequeue(timeout=60)))
    got.append(reader.dequeue(timeout=60))
    second_reader.join(10)
    messages[0][1][0].connector_metadata = "unpickled"
    assert sorted(map(repr, map(exactly, got))) == sorted(map(repr, map(exactly, messages)))
