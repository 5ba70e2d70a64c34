"""The table: for a world size and dtype, which backends are fastest up to which message size; and
how it is made of measured times. Arithmetic only."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from vllm_commext.allreduce import limits
from vllm_commext.errors import ConfigError

SCHEMA = 1
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))
MIN_GAIN = 0.02  # a new winner must be that much faster, else noise would chop the ranges up
Times = Mapping[str, float]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One range of sizes, which begins where the row before ends."""

    max_bytes: int
    ranking: tuple[str, ...]  # the fastest first; the next one serves what the first cannot take


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranges of each dtype.

    Attributes:
        rows: by dtype, in rising order of size. Beyond the last nothing is known.
        origin: where the figures come from, in words, for the log.
        fused: as `rows`, of an all-reduce with the residual and the norm after it: who of
            `limits.FUSED` is fastest. Beyond the last range its ranking goes on.
    """

    world_size: int
    rows: dict[str, tuple[Row, ...]]
    origin: str
    fused: dict[str, tuple[Row, ...]] = msgspec.field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for dtype, rows in [*self.rows.items(), *self.fused.items()]:
            bounds = [row.max_bytes for row in rows]
            if any(low >= high for low, high in zip([0, *bounds], bounds, strict=False)):
                raise ValueError(f"expected rising positive sizes for {dtype}, got {bounds}")
            if any(not row.ranking for row in rows):
                raise ValueError(f"expected a backend in every row of {dtype}")

    def ranking(self, num_bytes: int, dtype: str) -> tuple[str, ...]:
        for row in self.rows.get(dtype, ()):
            if num_bytes <= row.max_bytes:
                return row.ranking
        return ()

    def fused_ranking(self, num_bytes: int, dtype: str) -> tuple[str, ...]:
        """Members of `limits.FUSED`, the fastest first; none of a dtype that is not known."""
        rows = self.fused.get(dtype, ())
        fitting = (row.ranking for row in rows if num_bytes <= row.max_bytes)
        return next(fitting, rows[-1].ranking if rows else ())

    def of_ours(self, dtype: str) -> "Table | None":
        """The table of one dtype where kernels of ours alone take part, and only where they come
        first: all else is left to vLLM. None where they never do."""
        rows = [
            Row(row.max_bytes, (limits.PUSH if row.ranking[0] == limits.PUSH else limits.VLLM,))
            for row in self.rows.get(dtype, ())
        ]
        fused = self.fused.get(dtype, ())
        first = {row.ranking[0] for row in (*rows, *fused)}
        if not first.intersection((limits.PUSH, limits.FUSED_PUSH)):
            return None
        return Table(
            self.world_size, {dtype: tuple(rows)}, self.origin, {dtype: fused} if fused else {}
        )

    def leads_up_to(self, dtype: str, name: str) -> int:
        """The largest size at which the backend comes first, or 0."""
        led = (row.max_bytes for row in self.rows.get(dtype, ()) if row.ranking[0] == name)
        return max(led, default=0)

    def leads_fused(self, name: str) -> int:
        """The largest size of any dtype at which one of `limits.FUSED` comes first, or 0."""
        rows = [row for of in self.fused.values() for row in of]
        return max((row.max_bytes for row in rows if row.ranking[0] == name), default=0)


def decode(text: bytes | str) -> Table:
    """Decode a table from JSON; ConfigError where it is none, or one of another schema."""
    try:
        table = msgspec.json.decode(text, type=Table)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"expected an all-reduce table, got something else: {error}") from error
    if table.schema != SCHEMA:
        raise ConfigError(f"expected a table of schema {SCHEMA}, got {table.schema}; tune again")
    return table


def median_of_slowest(samples_by_rank: Sequence[Sequence[float]]) -> float:
    """The median over samples of the slowest rank's time; ValueError where ranks give no sample or
    another number of them."""
    slowest = [max(sample) for sample in zip(*samples_by_rank, strict=True)]
    if not slowest:
        raise ValueError("expected at least one sample")
    return statistics.median(slowest)


def crossover(low: int, high: int, incumbent: Sequence[float], rival: Sequence[float]) -> int:
    """The largest size up to which the incumbent is kept, between two measured sizes.

    Both times are straight lines over the logarithm of the size. The incumbent won at `low` bytes,
    the rival at `high`; each has its times at both. Returns a size in [low, high), `low` where the
    rival wins from there on."""
    ahead, behind = rival[0] - incumbent[0], incumbent[1] - rival[1]
    if ahead <= 0 or behind <= 0:
        return low
    exponent = math.log2(low) + math.log2(high / low) * ahead / (ahead + behind)
    return min(max(int(2**exponent), low), high - 1)


def _ranked(times: Times, incumbent: str | None) -> tuple[str, ...]:
    ranked = sorted(times, key=lambda name: (times[name], name))
    if (
        incumbent is not None
        and incumbent in times
        and times[incumbent] <= times[ranked[0]] * (1 + MIN_GAIN)
    ):
        ranked.remove(incumbent)
        ranked.insert(0, incumbent)
    return tuple(ranked)


def build_rows(times: Mapping[int, Times]) -> tuple[Row, ...]:
    """A row for each run of sizes with one ranking; a change falls where the two lines cross.

    *times*: by size in bytes, the microseconds of each backend that could take it.
    """
    rows: list[Row] = []
    before: tuple[int, tuple[str, ...]] | None = None
    for size in sorted(size for size in times if times[size]):
        ranking = _ranked(times[size], before[1][0] if before else None)
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
    split = {dtype: apart_and_fused(of) for dtype, of in times.items()}
    rows = {dtype: build_rows(plain) for dtype, (plain, _) in split.items()}
    fused = {dtype: build_rows(of) for dtype, (_, of) in split.items() if of}
    return Table(world_size, rows, origin, fused)


def apart_and_fused(
    times: Mapping[int, Times],
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """By size, the times of the backends, and those of `limits.FUSED`, among which the fastest of
    the backends stands for all of them."""
    plain = {
        size: {name: time for name, time in of.items() if name not in limits.FUSED}
        for size, of in times.items()
    }
    fused = {
        size: {name: of[name] for name in limits.FUSED if name in of}
        for size, of in times.items()
        if limits.FUSED_PUSH in of
    }
    for size, of in fused.items():
        if plain[size]:
            of[limits.UNFUSED] = min(plain[size].values())
    return plain, fused


def size_text(num_bytes: int) -> str:
    for unit, name in UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def _leaders(rows: Iterable[Row]) -> list[tuple[str, int]]:
    leaders: list[tuple[str, int]] = []
    for row in rows:
        if leaders and leaders[-1][0] == row.ranking[0]:
            leaders.pop()
        leaders.append((row.ranking[0], row.max_bytes))
    return leaders


def describe(table: Table | None) -> Iterator[str]:
    """Yield a line a dtype: which backend comes first up to which size."""
    if table is None:
        yield "no table for this machine; vLLM's default dispatch serves"
        return
    for dtype, rows in table.rows.items():
        parts = (f"{name} up to {size_text(bound)}" for name, bound in _leaders(rows))
        yield f"{dtype}: {', '.join(parts)}, then vLLM's default dispatch ({table.origin})"
    for dtype, rows in table.fused.items():
        parts = (f"{name} up to {size_text(bound)}" for name, bound in _leaders(rows))
        yield f"{dtype}, with residual and norm: {', '.join(parts)}"
