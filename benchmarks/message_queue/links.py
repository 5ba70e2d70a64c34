"""The variants: a writer here, readers in processes of their own, and how both are placed.

A link sends one object to all readers and takes their answers: each answers with the object that
it got, over a way of its own, unless it is a tuple. A call, a tuple as the engine sends it to its
workers, is answered by the first reader, as by vLLM's output rank, with the next of the answers
that it was given before.
"""

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import zmq

QUEUES = {
    "ours": ("vllm_commext.compat.shm_queue", "GroupMessageQueue"),
    "vllm": ("vllm.distributed.device_communicators.shm_broadcast", "MessageQueue"),
}
VARIANTS = ("ours", "vllm", "pipe", "zmq")
PLACEMENTS = ("free", "pinned", "one core", "busy")
SPAWN = multiprocessing.get_context("spawn")
READY_SECONDS, ANSWER_SECONDS = 300, 120
BUSY_LOOP = "while True: pass"
CALL_LENGTH = 4  # method, arguments, keyword arguments, rank that answers


def core_of(placement: str, place: int) -> int | None:
    """The core of the writer (place 0) or a reader (its rank + 1); None for any."""
    if placement not in ("pinned", "one core"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[0] if placement == "one core" else cores[place % len(cores)]


def pin(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def placed(placement: str) -> Iterator[None]:
    """This process where the writer belongs, and beside it two processes that never rest, if so."""
    before = os.sched_getaffinity(0)
    n_busy = 2 if placement == "busy" else 0
    busy = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(n_busy)]
    pin(core_of(placement, 0))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for one in busy:
            one.kill()
            one.wait()


@dataclasses.dataclass
class Answers:
    """What the first reader answers calls with, one after the other.

    It is busy for `step_seconds` before each answer that holds an output: vLLM's worker on a GPU
    answers `execute_model` with None at once, and then `sample_tokens` when the GPU is done.
    """

    answers: list[Any]
    step_seconds: float


@dataclasses.dataclass
class Link:
    """The writer's side: how to send to all, to receive from each, and who the readers are."""

    send: Callable[[Any], None]
    receive: Sequence[Callable[[], Any]]
    pids: list[int]
    holds_little: bool = False  # so that two who send to each other first would wait for ever

    def round_trip(self, obj: object) -> None:
        self.send(obj)
        for receive in self.receive:
            receive()

    def step(self, calls: Sequence[Any]) -> None:
        """The calls of a step, each after the answer to the one before."""
        for call in calls:
            self.send(call)
            self.receive[0]()


def answer_all(rank: int, receive: Callable[[], Any], send: Callable[[Any], None]) -> None:
    told, number = Answers([], 0.0), 0
    while (obj := receive()) is not None:
        got = time.perf_counter()
        if isinstance(obj, Answers):
            told, number = obj, 0
            send("ready")
        elif not isinstance(obj, tuple):
            send(obj)
        elif len(obj) == CALL_LENGTH and rank == 0:
            status, answer = told.answers[number]
            while answer is not None and time.perf_counter() - got < told.step_seconds:
                pass
            send((status, answer))
            number += 1


def queue_class(variant: str) -> Any:
    module, name = QUEUES[variant]
    return getattr(importlib.import_module(module), name)


def serve_queue(variant: str, rank: int, core: int | None, control: Connection) -> None:
    pin(core)
    queue = queue_class(variant)
    requests = queue.create_from_handle(control.recv(), rank)
    answers = queue(1, 1)
    control.send(answers.export_handle())
    requests.wait_until_ready()
    answers.wait_until_ready()
    answer_all(rank, lambda: requests.dequeue(indefinite=True), answers.enqueue)


def link_queue(variant: str, controls: list[Connection], pids: list[int]) -> Link:
    queue = queue_class(variant)
    requests = queue(len(controls), len(controls))
    for control in controls:
        control.send(requests.export_handle())
    handles = []
    for control in controls:
        if not control.poll(READY_SECONDS):
            raise TimeoutError(f"a reader of {variant} did not start in {READY_SECONDS} s")
        handles.append(control.recv())
    answers = [queue.create_from_handle(handle, 0) for handle in handles]
    requests.wait_until_ready()
    for answer in answers:
        answer.wait_until_ready()
    receive = [lambda answer=answer: answer.dequeue(timeout=ANSWER_SECONDS) for answer in answers]
    return Link(requests.enqueue, receive, pids)


def serve_pipe(_variant: str, rank: int, core: int | None, control: Connection) -> None:
    pin(core)
    answer_all(rank, control.recv, control.send)


def link_pipe(_variant: str, controls: list[Connection], pids: list[int]) -> Link:
    def send(obj: object) -> None:
        for control in controls:
            control.send(obj)

    return Link(send, [control.recv for control in controls], pids, holds_little=True)


def zmq_send(socket: "zmq.Socket[bytes]", obj: object) -> None:
    socket.send(pickle.dumps(obj, protocol=5), copy=False)


def zmq_receive(socket: "zmq.Socket[bytes]") -> Any:
    return pickle.loads(socket.recv(copy=False).buffer)


def serve_zmq(_variant: str, rank: int, core: int | None, control: Connection) -> None:
    """Requests over PUB and SUB, answers over PUSH and PULL."""
    pin(core)
    context, (requests_at, answers_at) = zmq.Context(), control.recv()
    requests, answers = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    requests.subscribe(b"")
    requests.connect(requests_at)
    answers.connect(answers_at)
    answer_all(rank, lambda: zmq_receive(requests), lambda obj: zmq_send(answers, obj))


def link_zmq(_variant: str, controls: list[Connection], pids: list[int]) -> Link:
    folder, context = tempfile.mkdtemp(prefix="shm_bench_"), zmq.Context()
    requests = context.socket(zmq.XPUB)
    requests.setsockopt(zmq.XPUB_VERBOSE, 1)
    requests.setsockopt(zmq.XPUB_NODROP, 1)
    requests.bind(f"ipc://{folder}/requests")
    receive = []
    for rank, control in enumerate(controls):
        answers = context.socket(zmq.PULL)
        answers.bind(f"ipc://{folder}/{rank}")
        control.send((f"ipc://{folder}/requests", f"ipc://{folder}/{rank}"))
        receive.append(lambda answers=answers: zmq_receive(answers))
    for _ in controls:
        requests.recv()  # a subscription
    return Link(lambda obj: zmq_send(requests, obj), receive, pids)


def parts_of(variant: str) -> tuple[Callable[..., None], Callable[..., Link]]:
    if variant == "pipe":
        return serve_pipe, link_pipe
    if variant == "zmq":
        return serve_zmq, link_zmq
    return serve_queue, link_queue


@contextlib.contextmanager
def linked(variant: str, n_readers: int, placement: str) -> Iterator[Link]:
    """Start a variant's readers; they end with the block."""
    serve, link = parts_of(variant)
    pairs = [SPAWN.Pipe() for _ in range(n_readers)]
    processes = [
        SPAWN.Process(
            target=serve, args=(variant, rank, core_of(placement, rank + 1), pairs[rank][1])
        )
        for rank in range(n_readers)
    ]
    for process in processes:
        process.start()
    try:
        made = link(variant, [ours for ours, _ in pairs], [p.pid or 0 for p in processes])
        made.round_trip("warm")
        yield made
        made.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
