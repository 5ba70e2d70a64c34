"""``vllm-commext bench --shapes``: which use of a host's GPUs has the most requests in time."""

import argparse
import asyncio
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from vllm_commext.bench import figures
from vllm_commext.cli import rounds, serve
from vllm_commext.cli.rounds import Contestant
from vllm_commext.errors import ConfigError
from vllm_commext.serve import checks, plan
from vllm_commext.serve.plan import Request


def run(args: argparse.Namespace) -> int:
    """0: measured. Raises `ConfigError` for what cannot start, `KeyboardInterrupt` at a signal."""
    gpus, here = serve.gpus_of(args)
    num = args.engines or serve.NUM_CPU_ENGINES
    limits = (max(round(args.tpot_ms), 1), max(round(args.ttft_ms), 1))
    one = Request(args.shapes, gpus, num, 1, plan.LOOPBACK, 0, *limits, tuple(args.engine_args))
    checks.check(one, here)
    with serve.folders(None) as (folder, logs):
        contestants: list[Contestant] = []
        for tp in _sizes(len(gpus)):
            contestants += asyncio.run(_play(args, replace(one, tp=tp), folder, logs / f"tp{tp}"))
        if not contestants:
            raise ConfigError(f"expected a shape that starts, got none; see {logs}")
        good, allowed = figures.num_good, rounds.limits_of(args)
        ways = sorted(contestants, key=lambda one: -sum(good(of, allowed) for of in one.rounds))
        rounds.tell(args, contestants, [(_verdict(args, ways), False)])
        shutil.rmtree(logs, ignore_errors=True)
    return 0


def _sizes(num_gpus: int) -> list[int]:
    """Tensor-parallel sizes that divide the GPUs, by powers of two; 1 on CPUs."""
    sizes = [1 << power for power in range(num_gpus.bit_length())]
    return [size for size in sizes if num_gpus % size == 0] if num_gpus else [1]


async def _play(
    args: argparse.Namespace, request: Request, folder: Path, logs: Path
) -> list[Contestant]:
    """Start the engines of one size and play all rounds in each way to use them; nothing where
    they do not start."""
    from vllm_commext.serve.supervisor import StartError, Supervisor

    logs.mkdir()
    with closing(checks.free_ports()) as ports:
        engines, proxies = plan.shapes(request, folder, ports, os.environ)
    each = f"{len(engines)} x TP {request.tp}, "
    urls = {each + one.name: one.url for one in proxies}
    serve.say(f"{each}logs: {logs}")
    ready = asyncio.Event()
    supervisor = Supervisor(engines, proxies, logs, serve.say, ready.set)
    serving = asyncio.create_task(supervisor.run())
    playing = asyncio.create_task(_played(args, ready, urls))
    await asyncio.wait((serving, playing), return_when=asyncio.FIRST_COMPLETED)
    if not playing.done():
        playing.cancel()
    elif not serving.done():
        supervisor.ask_to_end()
    end, found = await asyncio.gather(serving, playing, return_exceptions=True)
    if isinstance(end, StartError) or end == 1:
        serve.say(
            f"{each}left out: {end if isinstance(end, StartError) else 'it failed too often'}"
        )
        return []
    if isinstance(end, BaseException):
        raise end
    if isinstance(found, asyncio.CancelledError):
        raise KeyboardInterrupt  # a signal, which has ended the engines
    if isinstance(found, BaseException):
        raise found
    return found


async def _played(
    args: argparse.Namespace, ready: asyncio.Event, urls: dict[str, str]
) -> list[Contestant]:
    await ready.wait()
    return await rounds.play(args, urls)


def _verdict(args: argparse.Namespace, ways: list[Contestant]) -> str:
    """The best way beside the next one."""
    best, *others = ways
    if not others:
        return f"{best.name}: the only way that started"
    found = figures.compare(others[0].rounds, best.rounds, rounds.limits_of(args))
    text = figures.verdict((others[0].name, best.name), found)
    return f"{best.name}: {text}" if found.differs else text
