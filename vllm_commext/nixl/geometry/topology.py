"""Which prefill ranks a decode rank reads from, by intervals of units.

A unit is what tensor parallelism deals out whole: a KV head, a head of state-space state, a group
of B and C projections. With U units over N ranks, rank r holds the units ``[r*U//N, (r+1)*U//N)``;
where N exceeds U, vLLM replicates each unit over N/U ranks, so that rank r holds the one unit
``r*U//N``. Some caches are replicated whole (multi-head latent attention).

Each unit that a decode rank needs is read from one of the prefill ranks that hold it. A prefill
rank without a reader must still learn that its blocks are free, by one decode rank.

Of engines with pipeline stages, each stage's ranks do the same with those of every stage of the
other engine: they read the layers that both have, and where there is none, they only say so."""

from collections.abc import Collection
from dataclasses import dataclass

from vllm_commext.errors import UnsupportedError


@dataclass(frozen=True)
class Rank:
    """One worker's place in its engine: ``index`` of ``size`` tensor-parallel ranks, from 0."""

    size: int
    index: int


@dataclass(frozen=True, order=True)
class Split:
    """How units are dealt out to ranks; each holds all of them where they are replicated."""

    num_units: int
    replicated: bool = False


def interval(split: Split, rank: Rank) -> tuple[int, int]:
    if split.replicated:
        return 0, split.num_units
    first = rank.index * split.num_units // rank.size
    end = (rank.index + 1) * split.num_units // rank.size
    return first, max(end, first + 1)


def check_even(split: Split, size: int, what: str) -> None:
    """Raise UnsupportedError where ranks would hold different numbers of units."""
    uneven = split.num_units % size and size % split.num_units
    if uneven and not split.replicated:
        raise UnsupportedError(
            f"{what}: {split.num_units} cannot be dealt out evenly to {size} tensor-parallel "
            "ranks; expected one of the two to be a multiple of the other"
        )


def units_from(split: Split, reader: Rank, source: Rank) -> tuple[int, int]:
    """The units ``[first, end)`` that a decode rank reads from a prefill rank, empty where ``first
    == end``.

    Of several holders of a unit the reader takes the one nearest to its own place, so that the
    readers spread over the replicas."""
    first, end = interval(split, reader)
    taken = [
        unit
        for unit in range(first, end)
        if _source_of(split, unit, reader, source.size) == source.index
    ]
    return (taken[0], taken[-1] + 1) if taken else (first, first)


def _source_of(split: Split, unit: int, reader: Rank, num_sources: int) -> int:
    own_place = reader.index * num_sources // reader.size
    if split.replicated:
        return own_place
    # The first that holds it; who holds it itself has no place beyond the last one.
    return max(own_place, unit * num_sources // split.num_units)


@dataclass(frozen=True)
class Sources:
    """A decode rank's part in reading from a prefill engine; workers after ``over_stages``.

    Attributes:
        read: prefill ranks that it reads from, ascending.
        num_consumers: for each of these, and for those that it has only to release, the decode
            ranks that the prefill rank waits for.
    """

    read: tuple[int, ...]
    num_consumers: dict[int, int]


def sources(splits: Collection[Split], reader: Rank, num_sources: int) -> Sources:
    readers = [
        _ranks_read(splits, Rank(reader.size, index), num_sources) for index in range(reader.size)
    ]
    consumers = {source: sum(source in read for read in readers) for source in range(num_sources)}
    read = tuple(sorted(readers[reader.index]))
    unread = (source for source, count in consumers.items() if not count)
    own = (one for one in unread if one * reader.size // num_sources == reader.index)
    return Sources(read, {source: max(1, consumers[source]) for source in (*read, *own)})


def worker_number(stage: int, rank: Rank) -> int:
    return stage * rank.size + rank.index


def over_stages(
    found: Sources, num_ranks: int, *, num_stages: int, num_reader_stages: int
) -> Sources:
    """A decode worker's part in reading from all stages of a prefill engine, by worker numbers.

    ``found`` is its part within one stage of each engine; a prefill worker waits for all of
    ``num_reader_stages``."""

    def numbers(ranks: Collection[int]) -> tuple[int, ...]:
        stages = range(num_stages)
        return tuple(worker_number(one, Rank(num_ranks, rank)) for one in stages for rank in ranks)

    counts = [count * num_reader_stages for count in found.num_consumers.values()]
    return Sources(
        numbers(found.read),
        dict(zip(numbers(found.num_consumers), counts * num_stages, strict=True)),
    )


def _ranks_read(splits: Collection[Split], reader: Rank, num_sources: int) -> set[int]:
    return {
        _source_of(split, unit, reader, num_sources)
        for split in splits
        for unit in range(*interval(split, reader))
    }
