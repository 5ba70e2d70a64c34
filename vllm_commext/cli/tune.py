"""``vllm-commext tune allreduce --tp N``: measure the backends here, and keep what was found.

A process a GPU measures, ``python -m vllm_commext.cli.tune OPTIONS`` with options as JSON; the
command shows how far they are, and a table of microseconds.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_commext.allreduce import table as tables
from vllm_commext.allreduce.limits import ITEM_BYTES
from vllm_commext.allreduce.machine import have_access, keep_off_multicast
from vllm_commext.allreduce.measure import SIZES, Options
from vllm_commext.allreduce.table import describe, size_text
from vllm_commext.cli import above_zero
from vllm_commext.errors import CommextTimeoutError, UnsupportedError

BAR_WIDTH = 30  # letters
ABSENT = "-"
Times = Mapping[int, Mapping[str, float]]


def as_table(times: Times) -> str:
    """Markdown: a row a size, microseconds a call, the fastest marked by an asterisk; a column a
    backend, those with the most sizes first."""
    counts = Counter(name for of in times.values() for name in of)
    names = sorted(counts, key=lambda name: (-counts[name], name))
    lines = ["| size | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for size in sorted(times):
        of = times[size]
        best = min(of.values(), default=0.0)
        cells = [
            f"{of[name]:.1f}{'*' if of[name] == best else ''}" if name in of else ABSENT
            for name in names
        ]
        lines.append("| " + " | ".join([size_text(size), *cells]) + " |")
    return "\n".join(lines)


HELP = "measure all-reduce backends for tensor parallelism; vLLM uses the best at its next start"
START_SECONDS = 420.0  # importing vLLM, and FlashInfer compiling its kernels for the first time
FAILED_LINES = 15
_number = above_zero(int, "a whole number above 0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", choices=("allreduce",), help="what to measure")
    add("--tp", type=_number, required=True, metavar="N", help="number of GPUs")
    told = "of the messages; may be given several times (default: bfloat16)"
    add("--dtype", action="append", choices=sorted(ITEM_BYTES), help=told)
    add("--hidden", type=_number, default=8192, help="elements of a row")
    add("--samples", type=_number, default=21, help="of each backend and size")
    add("--seconds", type=_number, default=300, help="bound for the measurement")
    add("--no-save", action="store_true", help="leave the cache folder alone")
    add("--out", type=Path, metavar="DIR", help="also write the figures there")


def _check_gpus(wanted: int) -> None:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"torch cannot be imported: {error}") from error
    found = torch.cuda.device_count()
    if wanted < 2 or found < wanted:
        raise UnsupportedError(
            f"--tp {wanted}: expected 2 or more, and a machine with so many GPUs; found {found}"
        )
    if not have_access(torch.device("cuda")):
        raise UnsupportedError(
            "these GPUs have no peer access to each other, or NCCL_P2P_DISABLE or NCCL_P2P_LEVEL "
            "refuses it; vLLM's own all-reduce serves there, and there is nothing to tune"
        )


def _start(args: argparse.Namespace, log: Path) -> list[subprocess.Popen[str]]:
    environ = {**os.environ, "VLLM_COMMEXT_ALLREDUCE": "0", "VLLM_HOST_IP": "127.0.0.1"}
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    keep_off_multicast(environ)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    for rank in range(args.tp):
        chosen = Options(
            *(SIZES, tuple(args.dtype or ("bfloat16",)), args.hidden, args.samples),
            seconds=float(args.seconds),
        )
        options = RankOptions(rank, args.tp, port, chosen, not args.no_save)
        text = msgspec.json.encode(options).decode()
        with log.open("ab") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "vllm_commext.cli.tune", text],
                    env=environ,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=file,
                    text=True,
                )
            )
    return processes


def _stop(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait(30)


def _follow(
    processes: list[subprocess.Popen[str]], total: int
) -> tuple[dict[str, dict[int, dict[str, float]]], dict[str, Any] | None]:
    """Show the progress; returns the times by dtype and size, and rank 0's last message."""
    times: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    done = 0
    for line in processes[0].stdout or ():
        if not line.startswith(PREFIX):
            continue
        message = json.loads(line.removeprefix(PREFIX))
        if message["kind"] == "backends":
            print(f"backends on all ranks: {', '.join(message['names'])}", flush=True)
        elif message["kind"] == "size":
            done += 1
            found = {name: float(value) for name, value in message["times"].items()}
            times[message["dtype"]][message["size"]] = found
            best = min(found, key=found.__getitem__, default="none")
            bar = f"[{'#' * (BAR_WIDTH * done // total):<{BAR_WIDTH}}] {done}/{total}"
            print(f"{bar} {message['dtype']} {size_text(message['size'])}: {best}", flush=True)
        else:
            return times, message
    return times, None


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    _check_gpus(args.tp)
    total = len(SIZES) * len(args.dtype or ("bfloat16",))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ranks.log"
        processes = _start(args, log)
        started = time.monotonic()
        bound = START_SECONDS + 2 * args.seconds
        watch = threading.Timer(bound, _stop, [processes])
        watch.daemon = True
        watch.start()
        try:
            times, last = _follow(processes, total)
        finally:
            watch.cancel()
            _stop(processes)
            assert processes[0].stdout is not None
            processes[0].stdout.close()
        if last is None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-FAILED_LINES:])
            if time.monotonic() - started >= bound:
                raise CommextTimeoutError(f"the ranks did not end within {bound:.0f} s:\n{tail}")
            raise UnsupportedError(f"the ranks ended before they had measured:\n{tail}")
    _show(times, last, args.out)
    return 0


def _show(
    times: dict[str, dict[int, dict[str, float]]], last: dict[str, Any], out: Path | None
) -> None:
    for dtype, of in times.items():
        print(f"\n{dtype}, microseconds a call\n\n{as_table(of)}\n")
    for line in describe(tables.decode(last["table"])):
        print(line)
    print(f"kept in {last['path']}" if last["path"] else "not kept")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        file = out / "allreduce_tuning.json"
        figures = {"machine": last["machine"], "microseconds": times, "table": last["table"]}
        file.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"figures in {file}")


PREFIX = "commext-tune "


class RankOptions(msgspec.Struct, frozen=True):
    """One rank of `world_size`, which meet at `port` of this host; `save`: write the table to the
    user's cache folder."""

    rank: int
    world_size: int
    port: int
    measured: Options
    save: bool


def say(kind: str, **values: Any) -> None:
    """Print a line for the command; libraries may print lines of their own between them."""
    sys.stdout.write(f"\n{PREFIX}{json.dumps({'kind': kind, **values})}\n")
    sys.stdout.flush()


def measure_rank(options: RankOptions) -> None:
    from vllm_commext.allreduce import cache, flashinfer, limits, measure
    from vllm_commext.allreduce.creation import Parts, create_dispatcher
    from vllm_commext.allreduce.machine import read_machine
    from vllm_commext.collective import Collective
    from vllm_commext.compat.tp_group import fused_add_rms_norm, tensor_parallel

    keep_off_multicast()
    flashinfer.shared.budget_bytes = flashinfer.MEASURING_BYTES
    with tensor_parallel(options.rank, options.world_size, options.port) as group:
        made = group.device_communicator
        custom = made.ca_comm if made.ca_comm is not None and not made.ca_comm.disabled else None
        parts = Parts(made.cpu_group, made.device_group, made.device, custom, made.pynccl_comm)
        dispatcher = create_dispatcher(parts, None, wanted=limits.BACKENDS)
        collective = Collective.over(parts.cpu_group)
        first = options.rank == 0
        if first:
            say("backends", names=list(dispatcher.backends))

        def progress(dtype: str, size: int, times: Mapping[str, float]) -> None:
            if first:
                say("size", dtype=dtype, size=size, times=dict(times))

        times = measure.measure_backends(
            *(dispatcher, collective, options.measured, group.graph_capture, progress),
            norm=fused_add_rms_norm,
        )
        machine = read_machine(made.device)
        origin = f"measured on {options.world_size} x {machine.gpu}"
        table = tables.build_table(times, options.world_size, origin)
        if first:
            path = str(cache.save(machine, table, options.measured.hidden)) if options.save else ""
            text = msgspec.json.encode(table).decode()
            say("table", table=text, path=path, machine=msgspec.to_builtins(machine))
        collective.run(lambda: None)


if __name__ == "__main__":
    measure_rank(msgspec.json.decode(sys.argv[1], type=RankOptions))
    # The measurement is out; tearing down libraries that share memory need not go well.
    sys.stdout.flush()
    os._exit(0)
