"""Tables of what was played.  Pure.

Limits are applied to the recorded requests.  A contestant that was told limits stands for itself
under those alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pages

from goodputs.plays import Play
from vllm_commext.bench import figures
from vllm_commext.bench.figures import Sample
from vllm_commext.limits import Limits

COLUMNS = ("requests/s", "way", "first token ms", "TPOT ms", "longest gap ms", "tokens/s a GPU")
Rounds = dict[str, list[Sequence[Sample]]]
"""Of each contestant, the requests of each round."""


def cells_of(plays: Sequence[Play]) -> dict[tuple[str, float], Rounds]:
    """By workload and rate, contestants in the order in which they came first."""
    names = list(dict.fromkeys(play.contestant for play in plays))
    found: dict[tuple[str, float], Rounds] = {}
    for play in sorted(plays, key=lambda play: names.index(play.contestant)):
        found.setdefault(play.cell, {}).setdefault(play.contestant, []).append(play.samples)
    return found


def knowing(plays: Sequence[Play]) -> dict[str, Limits]:
    """Contestants that were told limits."""
    return {play.contestant: play.told for play in plays if play.told is not None}


def rivals(rounds: Rounds, told: Mapping[str, Limits], limits: Limits) -> list[tuple[str, str]]:
    """The best contestant that knows no limits, and the one that knows these; without any that
    does, the first and each other."""
    informed = [name for name in rounds if told.get(name) == limits]
    others = [name for name in rounds if name not in told]
    if told or not others:
        best = max(others, key=lambda name: _good(rounds[name], limits), default="")
        return [(best, name) for name in informed if best]
    return [(others[0], name) for name in others[1:]]


def _good(rounds: Sequence[Sequence[Sample]], limits: Limits) -> int:
    return sum(figures.num_good(samples, limits) for samples in rounds)


def _three(values: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * one:,.0f}" if one >= 0.1 else f"{1e3 * one:.1f}" for one in values)


def _share(rounds: Sequence[Sequence[Sample]], limits: Limits) -> str:
    """Percent that are good, and the least and the most over the rounds."""
    each = [100 * figures.num_good(one, limits) / max(len(one), 1) for one in rounds]
    mean = sum(each) / len(each)
    return f"{mean:.0f}" + (f" ({min(each):.0f}-{max(each):.0f})" if len(each) > 1 else "")


def figures_of(rounds: Sequence[Sequence[Sample]], num_gpus: int) -> dict[str, Any]:
    """Of one contestant in one cell, over all its rounds."""
    samples = [one for of in rounds for one in of]
    speeds = [figures.tokens_per_second(of) for of in rounds]
    return {
        **figures.summary(samples),
        "tokens/s a GPU": sum(speeds) / len(speeds) / num_gpus,
        "requests": len(samples),
        "errors": dict(figures.errors(samples)),
        "placements": dict(figures.placements(samples)),
        "answered": dict(figures.engines(samples)),
        "rounds": len(rounds),
    }


def _row(
    rate: float, name: str, rounds: Sequence[Sequence[Sample]], limits: Sequence[Limits], gpus: int
) -> list[str]:
    found = figures_of(rounds, gpus)
    failed = sum(found["errors"].values())
    return [
        f"{rate:.3g}",
        name,
        *(_three(found[key]) for key in ("first", "tpot", "gap")),
        f"{found['tokens/s a GPU']:,.0f}",
        *(_share(rounds, one) for one in limits),
        f"{failed} of {found['requests']}",
        _counts(found["placements"]),
        _counts(found["answered"]),
    ]


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.items()) or "-"


def short(limits: Limits) -> str:
    return f"{1e3 * limits.tpot:g} ms, {1e3 * limits.first:g} ms"


def verdicts(plays: Sequence[Play], workload: str, limits: Sequence[Limits]) -> list[str]:
    """Sentences, a rate and pair of limits each."""
    told, found = knowing(plays), list[str]()
    for (name, rate), rounds in cells_of(plays).items():
        for one in limits if name == workload else ():
            for pair in rivals(rounds, told, one):
                compared = figures.compare(rounds[pair[0]], rounds[pair[1]], one)
                found.append(f"- {rate:.3g} requests/s: {figures.verdict(pair, compared)}")
    return found


def markdown(
    plays: Sequence[Play], limits: Sequence[Limits], about: Mapping[str, Any], gpus: int
) -> list[str]:
    """The page's lines."""
    lines = pages.head("Goodput at equal GPUs, open load", about)
    lines += [
        "p50 / p90 / p99 over all rounds. Good: percent of requests with a time per output token "
        "and a time to the first below both limits (milliseconds), the least and the most of a "
        "round behind it; a failed request is not good.",
        "",
    ]
    cells = cells_of(plays)
    for workload in dict.fromkeys(name for name, _ in cells):
        columns = (
            *COLUMNS,
            *(f"good, {short(one)}" for one in limits),
            "failed",
            "placed",
            "answered",
        )
        rows = [
            _row(rate, contestant, of, limits, gpus)
            for (name, rate), rounds in sorted(cells.items(), key=lambda item: item[0])
            if name == workload
            for contestant, of in rounds.items()
        ]
        lines += [f"## {workload}", "", *pages.table(columns, rows), ""]
        lines += [*verdicts(plays, workload, limits), ""]
    return lines


def content(
    plays: Sequence[Play], limits: Sequence[Limits], about: Mapping[str, Any], gpus: int
) -> dict[str, Any]:
    """The same as JSON, without the requests themselves."""
    rows = [
        {
            "workload": workload,
            "rate": rate,
            "way": contestant,
            **figures_of(of, gpus),
            "good": {short(one): [figures.num_good(s, one) for s in of] for one in limits},
        }
        for (workload, rate), rounds in cells_of(plays).items()
        for contestant, of in rounds.items()
    ]
    return {"about": dict(about), "rows": rows}
