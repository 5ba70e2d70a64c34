"""Run by `make_wheels.py` with the Python of a clean environment: uses the installed package.

Prints one JSON object: ``version``, ``native`` (whether the queue's extension was built) and
``queue`` (``round trip``, or why there is none). Only the standard library and the installed
package are used.
"""

import importlib.util
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection

SECONDS = 60
MESSAGES = [b"small", {"tokens": list(range(1000))}, b"large" * 1_000_000]


def answer(there: object, back: Connection) -> None:
    """The other process: read everything from one queue, and write it into the other."""
    from vllm_commext.shm.queue import MessageQueue

    reader = MessageQueue.create_from_handle(there, 0)
    reader.wait_until_ready()
    writer = MessageQueue(1, 1)
    back.send(writer.export_handle())
    writer.wait_until_ready()
    for _ in MESSAGES:
        writer.enqueue(reader.dequeue(timeout=SECONDS), timeout=SECONDS)
    back.recv()  # until the parent has read everything


def round_trip() -> str:
    """Whether each message comes back equal from another process."""
    from vllm_commext.shm.queue import MessageQueue

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    writer = MessageQueue(1, 1)
    child = context.Process(target=answer, args=(writer.export_handle(), there), daemon=True)
    child.start()
    writer.wait_until_ready()
    if not here.poll(SECONDS):
        return f"the other process did not answer within {SECONDS} s"
    reader = MessageQueue.create_from_handle(here.recv(), 0)
    reader.wait_until_ready()
    for message in MESSAGES:
        writer.enqueue(message, timeout=SECONDS)
        if reader.dequeue(timeout=SECONDS) != message:
            return "a message came back changed"
    here.send("done")
    child.join(SECONDS)
    return "round trip" if child.exitcode == 0 else f"the other process ended with {child.exitcode}"


def facts() -> dict[str, object]:
    import vllm_commext
    from vllm_commext import plugin

    plugin.register()  # without vLLM it refuses every capability, and does not raise
    loaded = sorted({"torch", "vllm"} & set(sys.modules))
    if loaded:
        raise SystemExit(f"importing the package has imported {', '.join(loaded)}")
    native = importlib.util.find_spec("vllm_commext.shm._shm_ring") is not None
    return {
        "version": vllm_commext.__version__,
        "native": native,
        "queue": round_trip() if native else "left out",
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()) + "\n")
