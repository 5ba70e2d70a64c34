"""From times to a table: medians of the slowest rank, ranges of sizes, regret. Arithmetic only."""

import math
import statistics
from collections.abc import Mapping, Sequence

from vllm_commext.allreduce import names
from vllm_commext.allreduce.table.table import Row, Table

MIN_GAIN = 0.02  # a new winner must be that much faster, else noise would chop the ranges up
Times = Mapping[str, float]


def median_of_slowest(samples_by_rank: Sequence[Sequence[float]]) -> float:
    """The median over samples of the slowest rank's time; ranks give equally many samples.

    Raises:
        ValueError: there is no sample, or ranks differ in their number.
    """
    slowest = [max(sample) for sample in zip(*samples_by_rank, strict=True)]
    if not slowest:
        raise ValueError("expected at least one sample")
    return statistics.median(slowest)


def crossover(low: int, high: int, incumbent: Sequence[float], rival: Sequence[float]) -> int:
    """The largest size up to which the incumbent is kept, between two measured sizes.

    Both times are taken as straight lines over the logarithm of the size.

    Args:
        low: a size in bytes at which the incumbent won; `high`, a larger one, the rival's.
        incumbent: its times at both sizes; `rival` has the other's.

    Returns:
        A size in [low, high), `low` where the rival wins from there on.
    """
    ahead, behind = rival[0] - incumbent[0], incumbent[1] - rival[1]
    if ahead <= 0 or behind <= 0:
        return low
    exponent = math.log2(low) + math.log2(high / low) * ahead / (ahead + behind)
    return min(max(int(2**exponent), low), high - 1)


def _ranked(times: Times, incumbent: str | None, min_gain: float) -> tuple[str, ...]:
    ranked = sorted(times, key=lambda name: (times[name], name))
    if (
        incumbent is not None
        and incumbent in times
        and times[incumbent] <= times[ranked[0]] * (1 + min_gain)
    ):
        ranked.remove(incumbent)
        ranked.insert(0, incumbent)
    return tuple(ranked)


def build_rows(times: Mapping[int, Times], min_gain: float = MIN_GAIN) -> tuple[Row, ...]:
    """Ranges of sizes from measured times.

    Args:
        times: by size in bytes, the microseconds of each backend that could take it.
        min_gain: see `MIN_GAIN`.

    Returns:
        A row for each run of sizes with one ranking; a change falls where the two lines cross.
    """
    rows: list[Row] = []
    before: tuple[int, tuple[str, ...]] | None = None
    for size in sorted(size for size in times if times[size]):
        ranking = _ranked(times[size], before[1][0] if before else None, min_gain)
        if before is not None and ranking != before[1]:
            rows.append(Row(_boundary(before, (size, ranking), times), before[1]))
        before = (size, ranking)
    if before is not None:
        rows.append(Row(before[0], before[1]))
    return tuple(rows)


def _boundary(
    before: tuple[int, tuple[str, ...]],
    after: tuple[int, tuple[str, ...]],
    times: Mapping[int, Times],
) -> int:
    (low, (old, *_)), (high, (new, *_)) = before, after
    if old == new:
        return low
    if old not in times[high]:
        return high - 1  # it takes no message of that size; up to there its own bound decides
    if new not in times[low]:
        return low
    return crossover(
        low, high, (times[low][old], times[high][old]), (times[low][new], times[high][new])
    )


def build_table(times: Mapping[str, Mapping[int, Times]], world_size: int, origin: str) -> Table:
    """A table of all dtypes that were measured; who of `names.FUSED` was, stands apart."""
    split = {dtype: apart_and_fused(of) for dtype, of in times.items()}
    rows = {dtype: build_rows(plain) for dtype, (plain, _) in split.items()}
    fused = {dtype: build_rows(of) for dtype, (_, of) in split.items() if of}
    return Table(world_size, rows, origin, fused)


def apart_and_fused(
    times: Mapping[int, Times],
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """By size: the times of the backends, and those of `names.FUSED`, among which the fastest of
    the backends stands for all of them."""
    plain = {
        size: {name: time for name, time in of.items() if name not in names.FUSED}
        for size, of in times.items()
    }
    fused = {
        size: {name: of[name] for name in names.FUSED if name in of}
        for size, of in times.items()
        if names.FUSED_PUSH in of
    }
    for size, of in fused.items():
        if plain[size]:
            of[names.UNFUSED] = min(plain[size].values())
    return plain, fused


def regret(chosen: float, times: Times) -> float:
    """How much slower the choice is than the best backend: 0.03 is three per cent.

    Raises:
        ValueError: nothing was measured.
    """
    if not times:
        raise ValueError("expected the time of at least one backend")
    return chosen / min(times.values()) - 1
