"""What one round of one variant gives, as figures; and their comparison. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from load import Stream

from vllm_commext.bench.figures import quantile

OFF, ON = "off", "on"
VARIANTS = (OFF, ON)
TOKENS_PER_SECOND = "output tokens/s"
PERCENT = "% of a core"


# Name, unit and value.
Figure = tuple[str, str, float]


class Sample(NamedTuple):
    """One figure of one round."""

    cell: str
    variant: str
    number: int
    figure: str
    unit: str
    value: float


class Row(NamedTuple):
    """One figure: medians over the rounds, and how many times better `on` is: the median, the
    smallest and the largest over rounds."""

    cell: str
    figure: str
    unit: str
    off: float
    on: float
    ratios: tuple[float, float, float]


def of_load(streams: Sequence[Stream], seconds: float) -> list[Figure]:
    """What the client sees; a time per output token is the mean after the first."""
    each = [one.token_seconds() for one in streams]
    times = {
        "time to first token": [1e3 * one[0] for one in each],
        "time per output token": [1e3 * (one[-1] - one[0]) / max(len(one) - 1, 1) for one in each],
        "whole request": [1e3 * one[-1] for one in each],
    }
    found = [
        (f"{name}, {label}", "ms", quantile(values, share))
        for name, values in times.items()
        for label, share in (("p50", 0.5), ("p99", 0.99))
    ]
    num_tokens = sum(map(len, each))
    return [*found, ("throughput", TOKENS_PER_SECOND, num_tokens / seconds)]


def of_cpu(spent: Mapping[str, float], num_tokens: int) -> list[Figure]:
    """CPU time during the load for each server, a thousand tokens of output."""
    each = {**spent, "all servers": sum(spent.values())}
    return [
        (f"CPU, {name}", "ms per 1000 tokens", 1e6 * seconds / num_tokens)
        for name, seconds in each.items()
    ]


def of_silence(spent: Mapping[str, float], seconds: float) -> list[Figure]:
    """CPU during silence of each server."""
    return [(f"idle, {name}", PERCENT, 100 * value / seconds) for name, value in spent.items()]


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Figures in the order in which they were measured first."""
    found: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    for sample in samples:
        key = (sample.cell, sample.figure, sample.unit)
        by_round = found.setdefault(key, {OFF: {}, ON: {}})[sample.variant]
        by_round[sample.number] = sample.value
    return [_row(*key, values[OFF], values[ON]) for key, values in found.items()]


def _row(
    cell: str, figure: str, unit: str, off: Mapping[int, float], on: Mapping[int, float]
) -> Row:
    more_is_better = unit == TOKENS_PER_SECOND
    ratios = [
        (on[number] / off[number]) if more_is_better else off[number] / max(on[number], 1e-3)
        for number in sorted(off.keys() & on.keys())
    ]
    return Row(
        cell,
        figure,
        unit,
        statistics.median(off.values()),
        statistics.median(on.values()),
        (statistics.median(ratios), min(ratios), max(ratios)),
    )
