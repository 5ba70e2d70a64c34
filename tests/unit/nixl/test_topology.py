"""Who reads what from whom, against units dealt out one by one; `test_plan.py` has that every unit
arrives."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.nixl.case_strategies import fits
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.topology import (
    Rank,
    Split,
    check_even,
    over_stages,
    sources,
    units_from,
    worker_number,
)

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
UNITS = st.integers(1, 48)


def dealt(split: Split, size: int) -> list[list[int]]:
    """Units of each rank, dealt one by one: in equal runs, or each unit to equally many ranks."""
    if split.replicated:
        return [list(range(split.num_units)) for _ in range(size)]
    ranks: list[list[int]] = [[] for _ in range(size)]
    if size <= split.num_units:
        for unit in range(split.num_units):
            ranks[unit // (split.num_units // size)].append(unit)
        return ranks
    unit_of_rank = [unit for unit in range(split.num_units) for _ in range(size // split.num_units)]
    return [[unit] for unit in unit_of_rank]


@st.composite
def splits(draw: st.DrawFn, *sizes: int) -> Split:
    """Any that vLLM deals out to engines of these sizes."""
    split = Split(draw(UNITS), draw(st.sampled_from([False, False, True])))
    assume(split.replicated or all(fits(split.num_units, size) for size in sizes))
    return split


@pytest.mark.parametrize("size", range(1, 13))
def test_only_even_splits_are_accepted(size: int) -> None:
    for num_units in range(1, 25):
        check_even(Split(num_units, replicated=True), size, "heads")
        if fits(num_units, size):
            check_even(Split(num_units), size, "heads")
            continue
        with pytest.raises(UnsupportedError, match=f"heads: {num_units} .* to {size} tensor-par"):
            check_even(Split(num_units), size, "heads")


@given(st.data(), SIZES, SIZES)
@settings(max_examples=60)
def test_readers_spread_over_the_holders_of_a_unit(
    data: st.DataObject, num_sources: int, num_readers: int
) -> None:
    split = data.draw(splits(num_sources, num_readers))
    holders, readers = dealt(split, num_sources), dealt(split, num_readers)
    for unit in range(split.num_units):
        holding = [source for source, units in enumerate(holders) if unit in units]
        needing = [reader for reader, units in enumerate(readers) if unit in units]
        counts = [
            sum(
                unit
                in range(*units_from(split, Rank(num_readers, reader), Rank(num_sources, source)))
                for reader in needing
            )
            for source in holding
        ]
        assert max(counts) <= -(-len(needing) // len(holding))


@given(st.data(), SIZES, SIZES, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=100)
def test_every_worker_of_every_stage_waits_for_those_that_come(
    data: st.DataObject, num_sources: int, num_readers: int, num_stages: int, num_own: int
) -> None:
    dealt_out = data.draw(st.lists(splits(num_sources, num_readers), min_size=1, max_size=3))
    alone = [
        sources(dealt_out, Rank(num_readers, rank), num_sources) for rank in range(num_readers)
    ]
    for rank, one in enumerate(alone):
        reads = [
            source
            for source in range(num_sources)
            if any(
                len(range(*units_from(split, Rank(num_readers, rank), Rank(num_sources, source))))
                for split in dealt_out
            )
        ]
        assert list(one.read) == reads
    plans = [
        over_stages(one, num_sources, num_stages=num_stages, num_reader_stages=num_own)
        for _ in range(num_own)
        for one in alone
    ]
    for stage in range(num_stages):
        for rank in range(num_sources):
            number = stage * num_sources + rank
            assert worker_number(stage, Rank(num_sources, rank)) == number
            coming = [plan for plan in plans if number in plan.num_consumers]
            assert coming
            assert {plan.num_consumers[number] for plan in coming} == {len(coming)}
            # Whoever reads from a rank of one stage has to do with that rank of each.
            for one, plan in zip(alone * num_own, plans, strict=True):
                assert (rank in one.read) == (number in plan.read)
    for plan in plans:
        assert set(plan.num_consumers) >= set(plan.read)
        assert max(plan.num_consumers, default=0) < num_stages * num_sources
