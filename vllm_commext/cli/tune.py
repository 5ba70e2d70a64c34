"""``vllm-commext tune allreduce --tp N``: measure the backends here, and keep what was found.

A process a GPU measures, ``python -m vllm_commext.cli.tune OPTIONS`` with options as JSON; the
command shows how far they are, a table of microseconds and curves.
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
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_commext.allreduce import multicast
from vllm_commext.allreduce.limits import ITEM_BYTES
from vllm_commext.allreduce.table import table as tables
from vllm_commext.allreduce.table.machine import have_access
from vllm_commext.allreduce.table.measure import SIZES
from vllm_commext.allreduce.table.table import describe, size_text
from vllm_commext.cli import above_zero
from vllm_commext.errors import CommextTimeoutError, UnsupportedError

BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 30  # letters
ABSENT = "-"
Times = Mapping[int, Mapping[str, float]]


def columns(times: Times) -> list[str]:
    """The backends that were measured, those with the most sizes first."""
    names = sorted({name for of in times.values() for name in of})
    return sorted(names, key=lambda name: -sum(name in of for of in times.values()))


def as_table(times: Times) -> str:
    """Markdown: a row a size, microseconds a call, the fastest marked by an asterisk."""
    names = columns(times)
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


def as_curves(times: Times) -> str:
    """A line a backend: how far it is from the best, from small sizes to large.

    The lowest bar is the fastest backend, the highest is twice its time or more.
    """
    names = columns(times)
    if not names:
        return ""
    width = max(map(len, names))
    lines = [f"{name:<{width}} {_bars(times, name)}" for name in names]
    sizes = sorted(times)
    span = f"{size_text(sizes[0])} .. {size_text(sizes[-1])}"
    return "\n".join([*lines, f"{'':<{width}} {span}; low is fast, full height is 2x the best"])


def _bars(times: Times, name: str) -> str:
    steps, bars = len(BARS) - 1, ""
    for _, of in sorted(times.items()):
        more = of[name] / min(of.values()) - 1 if name in of else None
        bars += " " if more is None else BARS[min(int(more * steps + 0.5), steps)]
    return bars


HELP = "benchmark all-reduce backends on this machine; vLLM uses the result at its next start"
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
            f"--tp {wanted}: expected 2 or more, and as many GPUs; found {found} GPUs"
        )
    if not have_access(torch.device("cuda")):
        raise UnsupportedError(
            "these GPUs have no peer access to each other, or NCCL_P2P_DISABLE or NCCL_P2P_LEVEL "
            "refuses it; vLLM's own all-reduce serves there, and there is nothing to tune"
        )


def _start(args: argparse.Namespace, log: Path) -> list[subprocess.Popen[str]]:
    environ = {**os.environ, "VLLM_COMMEXT_ALLREDUCE": "0", "VLLM_HOST_IP": "127.0.0.1"}
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multicast.keep_off(environ)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    for rank in range(args.tp):
        options = RankOptions(
            *(rank, args.tp, port, SIZES, tuple(args.dtype or ("bfloat16",)), args.hidden),
            *(args.samples, float(args.seconds), not args.no_save),
        )
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
        print(as_curves(of))
    print()
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
    """One rank of `world_size`, which meet at `port` of this host; `sizes` in bytes and what
    follows as in `measure.Options`; `save`: write the table to the user's cache folder."""

    rank: int
    world_size: int
    port: int
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    hidden: int
    samples: int
    seconds: float
    save: bool


def say(kind: str, **values: Any) -> None:
    """Print a line for the command; libraries may print lines of their own between them."""
    sys.stdout.write(f"\n{PREFIX}{json.dumps({'kind': kind, **values})}\n")
    sys.stdout.flush()


def measure_rank(options: RankOptions) -> None:
    from vllm_commext.allreduce import limits
    from vllm_commext.allreduce.backends import flashinfer
    from vllm_commext.allreduce.creation import Parts, create_dispatcher
    from vllm_commext.allreduce.table import cache, measure
    from vllm_commext.allreduce.table.machine import read_machine
    from vllm_commext.collective import Collective
    from vllm_commext.compat.tp_group import fused_add_rms_norm, tensor_parallel

    multicast.keep_off()
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

        chosen = measure.Options(
            options.sizes, options.dtypes, options.hidden, options.samples, seconds=options.seconds
        )
        times = measure.measure_backends(
            *(dispatcher, collective, chosen, group.graph_capture, progress),
            norm=fused_add_rms_norm,
        )
        machine = read_machine(made.device)
        origin = f"measured on {options.world_size} x {machine.gpu}"
        table = tables.build_table(times, options.world_size, origin)
        if first:
            path = str(cache.save(machine, table, options.hidden)) if options.save else ""
            text = tables.encode(table).decode()
            say("table", table=text, path=path, machine=msgspec.to_builtins(machine))
        collective.run(lambda: None)


if __name__ == "__main__":
    measure_rank(msgspec.json.decode(sys.argv[1], type=RankOptions))
    # The measurement is out; tearing down libraries that share memory need not go well.
    sys.stdout.flush()
    os._exit(0)
