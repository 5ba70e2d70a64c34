"""Our message queue against the installed vLLM's, and `multiprocessing.Pipe`, in one run.

Every figure is the median over rounds in which all contestants take turns, so that what else the
machine does meets all of them. A round trip is: the writer sends to all readers over one queue, and
each answers with the same object over a queue of its own (for throughput, only the last one is
answered). Only ratios of one run mean anything.

    python benchmarks/shm_queue.py --rounds 5 --readers 1 2 4 --out benchmarks/results/mine

writes mine.md and mine.json. With ``--pin``, writer and readers are spread over the first cores.
"""

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
CLASSES = {
    "ours": "vllm_commext.shm.queue",
    "vllm": "vllm.distributed.device_communicators.shm_broadcast",
}
CONTESTANTS = ("ours", "vllm", "pipe")
SIZES = (100, 10 * KIB, 100 * KIB, MIB, 12 * MIB, 24 * MIB)
GAPS_SECONDS = (0.002, 0.01, 0.05, 1.4)
SPAWN = multiprocessing.get_context("spawn")
READY_SECONDS, ANSWER_SECONDS = 300, 120


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure: `value` in `unit` of a contestant in a case, of one round."""

    case: str
    unit: str
    n_readers: int
    contestant: str
    value: float


def pin(core: int | None) -> None:
    if core is not None:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[core % len(allowed)]})


def queue_class(contestant: str) -> Any:
    return importlib.import_module(CLASSES[contestant]).MessageQueue


def serve_queue(contestant: str, rank: int, core: int | None, control: Connection) -> None:
    """A reader: answers every object but tuples with itself, until None comes."""
    pin(core)
    queue = queue_class(contestant)
    requests = queue.create_from_handle(control.recv(), rank)
    answers = queue(1, 1)
    control.send(answers.export_handle())
    requests.wait_until_ready()
    answers.wait_until_ready()
    while (obj := requests.dequeue(indefinite=True)) is not None:
        if not isinstance(obj, tuple):
            answers.enqueue(obj)


def serve_pipe(_contestant: str, _rank: int, core: int | None, control: Connection) -> None:
    pin(core)
    while (obj := control.recv()) is not None:
        if not isinstance(obj, tuple):
            control.send(obj)


@dataclasses.dataclass
class Link:
    """The writer's side of one contestant: how to send to all and to receive from each."""

    send: Callable[[Any], None]
    receive: Sequence[Callable[[], Any]]
    pids: list[int]

    def round_trip(self, obj: object) -> None:
        self.send(obj)
        for receive in self.receive:
            receive()


def link_queue(contestant: str, controls: list[Connection], pids: list[int]) -> Link:
    queue = queue_class(contestant)
    requests = queue(len(controls), len(controls))
    for control in controls:
        control.send(requests.export_handle())
    handles = []
    for control in controls:
        if not control.poll(READY_SECONDS):
            raise TimeoutError(f"a reader of {contestant} did not start in {READY_SECONDS} s")
        handles.append(control.recv())
    answers = [queue.create_from_handle(handle, 0) for handle in handles]
    requests.wait_until_ready()
    for answer in answers:
        answer.wait_until_ready()
    receive = [lambda answer=answer: answer.dequeue(timeout=ANSWER_SECONDS) for answer in answers]
    return Link(requests.enqueue, receive, pids)


def link_pipe(controls: list[Connection], pids: list[int]) -> Link:
    def send(obj: object) -> None:
        for control in controls:
            control.send(obj)

    return Link(send, [control.recv for control in controls], pids)


@contextmanager
def readers(contestant: str, n_readers: int, pinned: bool) -> Iterator[Link]:
    """Start a contestant's readers; they end with the block."""
    pairs = [SPAWN.Pipe() for _ in range(n_readers)]
    serve = serve_pipe if contestant == "pipe" else serve_queue
    processes = [
        SPAWN.Process(
            target=serve, args=(contestant, rank, rank + 1 if pinned else None, pairs[rank][1])
        )
        for rank in range(n_readers)
    ]
    for process in processes:
        process.start()
    controls, pids = [pair[0] for pair in pairs], [process.pid or 0 for process in processes]
    try:
        is_pipe = contestant == "pipe"
        link = link_pipe(controls, pids) if is_pipe else link_queue(contestant, controls, pids)
        link.round_trip("warm")
        yield link
        link.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have run so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def scheduler_like(n_requests: int) -> dict[str, Any]:
    """An object of the shape and size of a decode step's SchedulerOutput."""
    return {
        "cached": [
            {"id": f"cmpl-{number:032x}", "blocks": ([number, number + 1],), "computed": number}
            for number in range(n_requests)
        ],
        "tokens": {f"cmpl-{number:032x}": 1 for number in range(n_requests)},
        "total": n_requests,
        "finished": {f"cmpl-{n_requests:032x}"},
    }


def payloads(sizes: Sequence[int]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for size in sizes:
        name = f"{size / MIB:.0f} MiB" if size >= MIB else f"{size / KIB:.1f} KiB"
        made[f"{name} bytes"] = os.urandom(size)
        if size >= 100 * KIB:
            made[f"{name} numpy"] = np.frombuffer(os.urandom(size), np.uint8).copy()
            if "torch" in sys.modules:
                made[f"{name} torch"] = sys.modules["torch"].from_numpy(
                    np.frombuffer(os.urandom(size), np.uint8).copy()
                )
    for n_requests in (8, 256):
        made[f"scheduler output of {n_requests}"] = scheduler_like(n_requests)
    return made


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def timed_round_trips(link: Link, obj: object, seconds: float) -> list[float]:
    """Microseconds of each, for about so many seconds, at least 5."""
    found: list[float] = []
    link.round_trip(obj)  # the first of its kind may import something
    until = time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < until:
        started = time.perf_counter_ns()
        link.round_trip(obj)
        found.append((time.perf_counter_ns() - started) / 1e3)
    return found


def burst(link: Link, obj: object, seconds: float) -> float:
    """Messages a second that all readers have taken."""
    count, message, started = 0, (obj,), time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(50):
            link.send(message)
        count += 50
    link.round_trip("the last")
    return count / (time.perf_counter() - started)


def paced(link: Link, gap: float, seconds: float) -> tuple[list[float], float]:
    """Round trips of 100 bytes at this gap, in microseconds, and a reader's share of a core."""
    obj, found = b"x" * 100, []
    busy, started = cpu_seconds(link.pids[0]), time.perf_counter()
    for _ in range(max(2, int(seconds / gap))):
        time.sleep(gap)
        before = time.perf_counter_ns()
        link.round_trip(obj)
        found.append((time.perf_counter_ns() - before) / 1e3)
    return found, (cpu_seconds(link.pids[0]) - busy) / (time.perf_counter() - started)


def in_turn(links: dict[str, Link]) -> Iterator[tuple[str, Link]]:
    """One contestant after the other; readers of vLLM's spin for a second after their turn."""
    for name, link in links.items():
        yield name, link
        if name == "vllm":
            time.sleep(1.2)


def measure(links: dict[str, Link], n_readers: int, args: argparse.Namespace) -> Iterator[Cell]:
    """One round: every case, and in it every contestant in turn."""
    for case, obj in payloads(args.sizes).items():
        for name, link in in_turn(links):
            found = timed_round_trips(link, obj, args.seconds)
            yield Cell(f"round trip, {case}", "us p50", n_readers, name, percentile(found, 0.5))
            yield Cell(f"round trip, {case}", "us p99", n_readers, name, percentile(found, 0.99))
    for size in (100, 10 * KIB):
        for name, link in in_turn(links):
            rate = burst(link, os.urandom(size), args.seconds)
            yield Cell(f"throughput, {size} B", "messages/s", n_readers, name, rate)
    for gap in args.gaps:
        for name, link in in_turn(links):
            found, share = paced(link, gap, max(args.seconds, 3 * gap))
            case = f"one message every {gap * 1e3:g} ms"
            yield Cell(case, "us p50", n_readers, name, percentile(found, 0.5))
            yield Cell(case, "% of a core, reader", n_readers, name, 100 * share)


def run(args: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    pin(0 if args.pin else None)
    for n_readers in args.readers:
        for number in range(args.rounds):
            cells += one_round(n_readers, args)
            print(f"{n_readers} readers, round {number + 1} of {args.rounds}", file=sys.stderr)
    return cells


def one_round(n_readers: int, args: argparse.Namespace) -> list[Cell]:
    """All contestants live side by side."""
    with ExitStack() as stack:
        links = {
            name: stack.enter_context(readers(name, n_readers, args.pin))
            for name in args.contestants
        }
        return list(measure(links, n_readers, args))


def medians(cells: list[Cell]) -> dict[tuple[int, str, str], dict[str, float]]:
    values: dict[tuple[int, str, str], dict[str, list[float]]] = {}
    for cell in cells:
        row = values.setdefault((cell.n_readers, cell.case, cell.unit), {})
        row.setdefault(cell.contestant, []).append(cell.value)
    return {
        key: {name: statistics.median(found) for name, found in row.items()}
        for key, row in values.items()
    }


def machine(args: argparse.Namespace) -> str:
    model = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    processor = model[0].partition(":")[2].strip() if model else platform.machine()
    now = datetime.now(timezone.utc)
    return (
        f"{now:%Y-%m-%d}, {os.cpu_count()} x {processor}, Linux {platform.release()}, Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f}, "
        f"{'pinned' if args.pin else 'not pinned'}, medians of {args.rounds} rounds"
    )


def markdown(cells: list[Cell], args: argparse.Namespace) -> str:
    names = args.contestants
    lines = ["# The message queue", "", machine(args), ""]
    lines += [f"| readers | case | unit | {' | '.join(names)} | ours better by |"]
    lines += ["|" + "---|" * (len(names) + 4)]
    for (n_readers, case, unit), row in medians(cells).items():
        figures = " | ".join(f"{row[name]:.4g}" for name in names)
        ratio = ""
        if {"ours", "vllm"} <= row.keys():
            advantage = row["vllm"] / max(row["ours"], 1e-9)
            ratio = f"{1 / advantage if unit == 'messages/s' else advantage:.2f}"
        lines.append(f"| {n_readers} | {case} | {unit} | {figures} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="in bytes")
    parser.add_argument("--gaps", type=float, nargs="*", default=list(GAPS_SECONDS))
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case and contestant")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    if "vllm" in args.contestants:
        importlib.import_module("torch")
    cells = run(args)
    report = markdown(cells, args)
    print(report)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(report)
        rows = [dataclasses.asdict(cell) for cell in cells]
        args.out.with_suffix(".json").write_text(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
