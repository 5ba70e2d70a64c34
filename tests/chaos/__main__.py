"""The long chaos run: real servers, constant load, seeded faults, a report.

    python -m tests.chaos --seed 1 --requests 2000 --faults 114 --out chaos-report

writes chaos-report.md, and the servers' logs into chaos-report.logs/.  Exit status: 0 where
everything held, 1 where not."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import nullcontext
from pathlib import Path

from tests.chaos.report import as_markdown, failures
from tests.chaos.scenario import run
from tests.chaos.schedule import BOUND_SECONDS, KINDS, MAX_TOKENS, Scenario
from tests.kit.forked import forking
from tests.kit.served import SERVED


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", dest="num_requests", type=int, default=2000)
    parser.add_argument("--faults", dest="num_faults", type=int, default=114)
    parser.add_argument("--clients", dest="num_clients", type=int, default=3)
    parser.add_argument(
        "--kinds", type=lambda text: tuple(text.split(",")), default=tuple(KINDS), help="by commas"
    )
    parser.add_argument(
        "--spares",
        action="store_true",
        help="a second engine in each role, and one policy throughout",
    )
    parser.add_argument(
        "--streams", action="store_true", help="read prompts while they are computed"
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="decode engines cache prefixes and offer blocks to one another: streams that move are "
        "read from the engine that drains",
    )
    parser.add_argument(
        "--talks", action="store_true", help="chats, messages, responses and tool calls, too"
    )
    parser.add_argument(
        "--no-namespaces", dest="namespaces", action="store_false", help="stay on loopback"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        help="with more, faults come to the engine that has most under way; needs --spares",
    )
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="no fault after these")
    parser.add_argument(
        "--bound-seconds",
        type=float,
        default=BOUND_SECONDS,
        help="what a client waits for a short answer; the proxy's limits are --proxy-args",
    )
    parser.add_argument("--serve", choices=sorted(SERVED), default="llama", help="default: llama")
    parser.add_argument("--proxy-args", nargs=argparse.REMAINDER, default=[], help="come last")
    parser.add_argument("--out", type=Path, default=Path("chaos-report"))
    return parser


def main() -> int:
    options = vars(parser().parse_args())
    out, served = options.pop("out"), SERVED[options.pop("serve")]
    folder = out.with_name(out.name + ".logs")
    folder.mkdir(parents=True, exist_ok=True)
    model = served.write(folder, "float32")
    scenario = Scenario(**options, args=tuple(served.cpu_options(model)), name=served.name)
    with forking() if scenario.aimed else nullcontext():
        record = run(scenario, model, folder, lambda line: print(line, flush=True))
    report = as_markdown(record)
    out.with_suffix(".md").write_text(report + "\n")
    print(report)
    return 1 if failures(record) else 0


if __name__ == "__main__":
    sys.exit(main())
