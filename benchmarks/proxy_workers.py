"""How much more a proxy of several worker processes gets done: requests and streamed tokens a
second under more load than it can take.

Paced engines stand in for vLLM, as in `benchmarks/proxy.py`; engines and clients have processes
enough of their own. Tokens count where they arrive. A machine needs more cores than the most
workers, engines and clients together for the figures to be the workers' own.

    python benchmarks/proxy_workers.py --workers 1 2 4 8 --engines 4 --clients 4 --out OUT
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import repository  # noqa: F401
from proxy import PROMPT, conditions, used
from proxy_load.processes import HERE, engine, running, wait_listening

from tests.kit.ports import free_port

INTERVAL_SECONDS = 0.01
REQUESTS, TOKENS = "requests of one token", f"tokens of streams, {1e3 * INTERVAL_SECONDS:g} ms"
WARM_UP_SECONDS = 1.0


@dataclass
class Row:
    """One load on one number of workers: what was done a second, and cores that the proxy used."""

    load: str
    workers: int
    round: int
    a_second: float
    cores: float
    num_failed: int


def crowd(port: int, args: argparse.Namespace, body: dict[str, Any], seconds: float) -> list[Any]:
    """What all client processes saw, begun together."""
    command = [sys.executable, str(HERE / "crowd.py"), str(port), str(args.streams)]
    command += [str(seconds), json.dumps(body)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    made = [subprocess.Popen(command, **pipes) for _ in range(args.clients)]
    time.sleep(WARM_UP_SECONDS)  # for their imports
    for process in made:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    return [json.loads(process.communicate(timeout=seconds + 60)[0]) for process in made]


def rows_of(
    args: argparse.Namespace, workers: int, number: int, urls: dict[str, list[str]], folder: Path
) -> Iterator[Row]:
    """Both loads on one proxy."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_commext", "proxy", "--port", str(port)]
    command += ["--workers", str(workers), "--log-level", "warning", "--max-in-flight", "100000"]
    for role, of in urls.items():
        for url in of:
            command += [f"--{role}", url]
    with running(command, folder / "proxy.log") as process:
        wait_listening(port)
        for load in (REQUESTS, TOKENS):
            num_tokens = 1 if load == REQUESTS else int(args.seconds / INTERVAL_SECONDS)
            body = {"model": "m", "prompt": PROMPT, "max_tokens": num_tokens}
            body |= {"stream": num_tokens > 1, "token_interval": INTERVAL_SECONDS}
            crowd(port, args, {**body, "max_tokens": min(num_tokens, 20)}, WARM_UP_SECONDS)
            before, began = used(process.pid), time.monotonic()
            seen = crowd(port, args, body, args.seconds)
            cores = (used(process.pid) - before) / (time.monotonic() - began - WARM_UP_SECONDS)
            done = sum(one["requests" if load == REQUESTS else "tokens"] for one in seen)
            seconds = max(args.seconds, time.monotonic() - began - WARM_UP_SECONDS)
            failed = sum(one["failed"] for one in seen)
            yield Row(load, workers, number, done / seconds, cores, failed)


def report(rows: Sequence[Row]) -> Iterator[str]:
    """A table in Markdown: medians of the rounds."""
    yield "| load | workers | a second | against one worker | cores used | failed |"
    yield "|---|---|---|---|---|---|"
    for load in (REQUESTS, TOKENS):
        one = 0.0
        for workers in sorted({row.workers for row in rows}):
            of = [row for row in rows if (row.load, row.workers) == (load, workers)]
            rate = statistics.median(row.a_second for row in of)
            one = one or rate
            cores = statistics.median(row.cores for row in of)
            failed = sum(row.num_failed for row in of)
            against = f"{rate:,.0f} | {rate / one:.2f}"
            yield f"| {load} | {workers} | {against} | {cores:.2f} | {failed} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[1, 2])
    add("--engines", type=int, default=2, help="of each role")
    add("--clients", type=int, default=2, help="client processes")
    add("--streams", type=int, default=128, help="of each client process")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=4.0, help="of each load")
    add("--out", type=Path, help="write OUT.md and OUT.json")
    args = parser.parse_args()
    rows: list[Row] = []
    lines = ["# The proxy by several worker processes", "", f"before: {conditions()}", ""]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        urls = {
            role: [
                f"http://127.0.0.1:{stack.enter_context(engine(folder, f'{role}{number}'))}"
                for number in range(args.engines)
            ]
            for role in ("prefill", "decode")
        }
        for number in range(args.rounds):
            for workers in args.workers:
                rows += rows_of(args, workers, number, urls, folder)
                print(*rows[-2:], sep="\n", flush=True)
    command = f"command: `python {' '.join(sys.argv)}`"
    lines += [*report(rows), "", command, "", f"after: {conditions()}", ""]
    sys.stdout.write("\n".join(lines))
    if args.out:
        args.out.with_suffix(".md").write_text("\n".join(lines))
        args.out.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows]))
    return 1 if any(row.num_failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
