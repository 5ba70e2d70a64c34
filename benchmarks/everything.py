"""Every benchmark that this machine can run, in its short form, as one report.

    python benchmarks/everything.py
    python benchmarks/everything.py --only queue serve --out benchmarks/results/mine

writes OUT.md and OUT.json, by default of today's date under benchmarks/results. The message queue,
the connector and real servers run anywhere; all-reduce and reduce-RMS need two GPUs. A benchmark
that fails is told in the report, the others run, and the end is 1.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PART_SECONDS = 1800
TAIL_CHARACTERS = 3000
HEADING = re.compile(r"^(?=#+ )", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """One benchmark's report and figures; ``error``: the end of its output where it failed."""

    command: str
    seconds: float
    markdown: str
    figures: Mapping[str, Any]
    error: str = ""


def num_gpus() -> int:
    """GPUs that torch sees; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def commands(gpus: int) -> dict[str, list[str]]:
    """Script and options of each benchmark for a machine with so many GPUs; ``--out`` comes on
    top."""
    found = {
        "queue": ["shm_queue.py", "--quick", "--variants", "ours", "vllm"],
        "cpu_collectives": ["cpu_collectives.py", "--quick"],
        "nixl": ["nixl_connector.py", "--quick"],
        "serve": ["serve.py", "--tp", "1", "--rounds", "3", "--requests", "32"],
    }
    if gpus < 2:
        return found
    size = "4" if gpus >= 4 else "2"
    half = ["0,1", "2,3"] if gpus >= 4 else ["0", "1"]
    found["serve"] = ["serve.py", "--device", "cuda", "--model", "dense", "--rounds", "3"]
    found["serve"] += ["--tp", str(len(half[0].split(","))), "--gpus", *half]
    found["allreduce"] = ["allreduce.py", "--quick", "--tp", size]
    found["reduce_rms"] = ["reduce_rms.py", "--quick", "--tp", size]
    return found


def run(command: Sequence[str]) -> Outcome:
    """One benchmark, whatever becomes of it."""
    script, *options = command
    shown = f"python benchmarks/{script} {' '.join(options)}"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # A folder to some, the beginning of files' names to others.
        out = Path(folder) / "report"
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / script), *options, "--out", str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PART_SECONDS,
                check=False,
            )
            error = done.stdout[-TAIL_CHARACTERS:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"not done after {PART_SECONDS} s"
        texts = [path.read_text() for path in sorted(Path(folder).rglob("*.md"))]
        figures = {path.stem: json.loads(path.read_text()) for path in Path(folder).rglob("*.json")}
    return Outcome(shown, time.monotonic() - started, "\n".join(texts), figures, error)


def markdown(outcomes: Mapping[str, Outcome]) -> str:
    """The reports one after the other, with what was run and what failed."""
    lines = [f"# All benchmarks, short forms, {datetime.now(UTC):%Y-%m-%d}", ""]
    lines += ["| benchmark | command | seconds | |", "|---|---|---|---|"]
    for name, one in outcomes.items():
        verdict = "**failed**" if one.error else ""
        lines.append(f"| {name} | `{one.command}` | {one.seconds:.0f} | {verdict} |")
    for name, one in outcomes.items():
        lines += ["", HEADING.sub("#", one.markdown).strip() or f"## {name}"]
        if one.error:
            lines += ["", "```", one.error.strip(), "```"]
    return "\n".join(lines) + "\n"


def save(outcomes: Mapping[str, Outcome], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(markdown(outcomes))
    found = {
        name: {"command": one.command, "error": one.error, **one.figures}
        for name, one in outcomes.items()
    }
    out.with_suffix(".json").write_text(json.dumps(found) + "\n")


def main() -> int:
    chosen = commands(num_gpus())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    parser.add_argument("--only", nargs="+", choices=chosen, default=list(chosen))
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"{today}_bench")
    args = parser.parse_args()
    outcomes: dict[str, Outcome] = {}
    for name in args.only:
        print(f"{name}: {' '.join(chosen[name])}", flush=True)
        outcomes[name] = run(chosen[name])
        print(f"{name}: {outcomes[name].seconds:.0f} s", flush=True)
        save(outcomes, args.out)
    print(markdown(outcomes))
    return 1 if any(one.error for one in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
