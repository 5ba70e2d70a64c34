"""Attacks on the real proxy and on real engines' side channels; a table of what others notice.

    python -m tests.attack --only idle --out attack-report

Each victim starts at a soft limit of 1,024 descriptors. While an attack lasts, others are served
within 100 ms, the victim's memory grows by at most 64 MiB, and everything is free again within 5 s
of the attacker's end. Exit status: 0 where all of that held, 1 where not."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.attack import proxy_attacks, share_attacks, side_attacks
from tests.attack.judge import Attack, Verdict, judge

ATTACKS: tuple[Attack, ...] = (
    *(*proxy_attacks.ATTACKS, *share_attacks.ATTACKS, *side_attacks.ATTACKS),
)
_HEAD = (
    "| attack | others, p50 | longest | of that stolen | without attack | memory | free after | |"
)


def main() -> int:
    """Run the attacks that are asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--only", action="append", choices=names, help="repeat it for several")
    parser.add_argument("--out", type=Path, help="folder for logs and the table")
    args = parser.parse_args()
    folder: Path = args.out or Path(tempfile.mkdtemp(prefix="commext-attack-"))
    folder.mkdir(parents=True, exist_ok=True)
    verdicts: list[Verdict] = []
    for attack in ATTACKS:
        if args.only and attack.name not in args.only:
            continue
        verdicts.append(judge(attack, folder))
        print(_row(verdicts[-1]), flush=True)
    table = "\n".join([_HEAD, "|" + "---|" * 8, *map(_row, verdicts)])
    (folder / "attacks.md").write_text(table + "\n")
    print(f"\n{table}\n\nlogs: {folder}", flush=True)
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    return 1 if problems else 0


def _row(verdict: Verdict) -> str:
    quiet, beside = verdict.quiet, verdict.beside
    free = "never" if verdict.free_seconds is None else f"{verdict.free_seconds:.1f} s"
    result = "; ".join(verdict.problems) or ("held, in the repeat" * verdict.is_repeat or "held")
    return (
        f"| {verdict.attack.name} | {beside.median * 1e3:.1f} ms of {len(beside.seconds)} "
        f"| {beside.longest * 1e3:.0f} ms | {(beside.longest - beside.longest_own) * 1e3:.0f} ms "
        f"| {quiet.median * 1e3:.1f}, {quiet.longest * 1e3:.0f} ms "
        f"| {verdict.growth_mib:+.0f} MiB | {free} | {result} |"
    )


if __name__ == "__main__":
    sys.exit(main())
