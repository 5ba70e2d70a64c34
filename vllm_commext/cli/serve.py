"""`vllm-commext serve`: engines on this host and the proxy in front of them."""

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from vllm_commext.errors import ConfigError
from vllm_commext.serve import checks, plan
from vllm_commext.serve.plan import Request

HELP = "serve a model with several engines of this host behind one address"
EPILOG = """Two engines, each on a GPU, and two on CPUs; after -- come options of vllm serve:
  vllm-commext serve MODEL --gpus 0,1 --tpot-ms 15 --ttft-ms 1000
  vllm-commext serve MODEL --engines 2 -- --max-model-len 4096"""
NUM_CPU_ENGINES = 2
say = partial(print, flush=True)
LONGEST_PATH = 45
"""Bytes of a folder of sockets' parent: a socket's path has 107 at most, with a name of 37."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or a name on a hub, as for vllm serve")
    add("--gpus", metavar="N[,N...]", help="GPUs to use; default: all")
    add("--engines", type=int, metavar="N", help="engines on CPUs; without GPUs 2")
    add("--tp", type=int, default=1, metavar="N", help="GPUs per engine; default: %(default)s")
    add("--host", default="127.0.0.1", help="of the proxy; default: %(default)s")
    add("--port", type=int, default=8000, help="of the proxy; default: %(default)s")
    add("--tpot-ms", type=int, default=0, metavar="MS", help="limit: mean time between tokens")
    add("--ttft-ms", type=int, default=0, metavar="MS", help="limit for the first token")
    add("--logs", type=Path, metavar="FOLDER", help="keep logs; else only after an error")
    add("--print", action="store_true", help="print the commands and start nothing")


def _request(args: argparse.Namespace) -> tuple[Request, dict[str, tuple[float, float]]]:
    """The request as typed, and the GPUs of this host. Raises `ConfigError`."""
    for option, least in (("tp", 1), ("engines", 1), ("tpot_ms", 0), ("ttft_ms", 0), ("port", 1)):
        value = getattr(args, option)
        if value is not None and value < least:
            typed = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{typed} {value}: expected at least {least}; correct it")
    if args.port > 65535:
        raise ConfigError(f"--port {args.port}: expected at most 65535; give another --port")
    if args.ttft_ms and not args.tpot_ms:
        raise ConfigError("--ttft-ms: expected --tpot-ms beside it, got none; add --tpot-ms")
    gpus, here = gpus_of(args)
    request = Request(
        *(args.model, gpus, args.engines or NUM_CPU_ENGINES, args.tp, args.host, args.port),
        *(args.tpot_ms, args.ttft_ms, tuple(args.engine_args)),
    )
    return request, here


def gpus_of(args: argparse.Namespace) -> tuple[tuple[str, ...], dict[str, tuple[float, float]]]:
    """The GPUs to use and those of this host, none where engines run on CPUs."""
    if args.engines and args.gpus:
        raise ConfigError("--engines and --gpus: expected one of them, got both; leave one out")
    here = {} if args.engines else checks.gpus_here()
    return tuple(part.strip() for part in args.gpus.split(",")) if args.gpus else tuple(here), here


def run(args: argparse.Namespace) -> int:
    """0: ended as asked; 1: no engine or no proxy is left. Raises `CommextError` with the cause if
    it cannot start."""
    request, here = _request(args)
    if args.print:
        with closing(checks.free_ports()) as ports:
            for one in plan.commands(request, Path("/run/user/commext"), ports, os.environ):
                print(one.as_shell())
        return 0
    checks.check(request, here)
    with folders(args.logs) as (folder, logs):
        return _serve(request, folder, logs)


@contextmanager
def folders(given: Path | None) -> Iterator[tuple[Path, Path]]:
    """A folder for sockets, which goes at the end, and one for logs, *given* or made. Signals of
    `ENDING` are blocked, but while a supervisor handles them."""
    parent = tempfile.gettempdir()
    parent = parent if len(os.fsencode(parent)) <= LONGEST_PATH else "/tmp"
    signal.pthread_sigmask(signal.SIG_BLOCK, plan.ENDING)
    folder = Path(tempfile.mkdtemp(prefix="commext-serve-", dir=parent))
    try:
        yield folder, _log_folder(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, plan.ENDING)


def _log_folder(given: Path | None, folder: Path) -> Path:
    logs = given or folder.with_name(f"{folder.name}-logs")
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "proxy.log").touch()
    except OSError as error:
        raise ConfigError(
            f"--logs {logs}: expected a folder that can be written, got {error.strerror}"
        ) from error
    return logs


def _serve(request: Request, folder: Path, logs: Path) -> int:
    from vllm_commext.serve.supervisor import Supervisor  # aiohttp, an extra that was checked

    with closing(checks.free_ports()) as ports:
        commands = plan.commands(request, folder, ports, os.environ)
    url, token = commands[-1].url, secrets.token_urlsafe(18)
    (folder / plan.TOKEN).write_text(token)
    example = f"curl {url}/v1/completions -H 'Content-Type: application/json' -d " + (
        f"""'{{"model": "{request.served_name}", "prompt": "Hello", "max_tokens": 16}}'"""
    )
    say(f"starting {len(commands) - 1} engines and the proxy; logs: {logs}")

    def on_ready() -> None:
        say(f"serving {request.served_name} at {url}/v1; try it:\n  {example}")
        say(f"to watch it in a browser: {commands[-1].admin_url}/#{token}")

    status = asyncio.run(Supervisor(commands[:-1], commands[-1:], logs, say, on_ready).run())
    if status == 0 and logs.parent == folder.parent and logs.name.startswith(folder.name):
        shutil.rmtree(logs, ignore_errors=True)
    return status
