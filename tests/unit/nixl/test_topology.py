"""Head intervals against an assignment made head by head."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.topology import RankShape, head_interval, source_rank


def deal(num_heads: int, tp_size: int) -> list[list[int]]:
    """Heads of each rank, dealt one by one: in equal runs, or each head to equally many ranks."""
    ranks: list[list[int]] = [[] for _ in range(tp_size)]
    if tp_size <= num_heads:
        for head in range(num_heads):
            ranks[head // (num_heads // tp_size)].append(head)
    else:
        rank = 0
        for head in range(num_heads):
            for _ in range(tp_size // num_heads):
                ranks[rank].append(head)
                rank += 1
    return ranks


@given(st.integers(1, 64), st.integers(1, 8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_intervals_are_the_dealt_heads(small: int, factor: int, more_heads: bool) -> None:
    num_heads, tp_size = (small * factor, small) if more_heads else (small, small * factor)
    for rank, heads in enumerate(deal(num_heads, tp_size)):
        first, end = head_interval(RankShape(tp_size, rank, num_heads))
        assert list(range(first, end)) == heads


@pytest.mark.parametrize(
    ("tp_size", "num_heads", "expected"),
    [
        (1, 8, [(0, 8)]),
        (2, 8, [(0, 4), (4, 8)]),
        (4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 1, [(0, 1)] * 4),
    ],
)
def test_small_cases(tp_size: int, num_heads: int, expected: list[tuple[int, int]]) -> None:
    shapes = [RankShape(tp_size, rank, num_heads) for rank in range(tp_size)]
    assert [head_interval(shape) for shape in shapes] == expected


@pytest.mark.parametrize("rank", range(4))
def test_a_replicated_cache_is_whole_on_every_rank(rank: int) -> None:
    assert head_interval(RankShape(4, rank, 1, replicated=True)) == (0, 1)
    assert head_interval(RankShape(4, rank, 6, replicated=True)) == (0, 6)


@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_a_rank_reads_the_rank_of_its_own_number(tp_size: int) -> None:
    for rank in range(tp_size):
        assert source_rank(RankShape(tp_size, rank, 8), tp_size) == rank


@pytest.mark.parametrize(("local", "remote"), [(1, 2), (2, 1), (4, 8)])
def test_other_sizes_are_refused_with_both_named(local: int, remote: int) -> None:
    with pytest.raises(UnsupportedError) as raised:
        source_rank(RankShape(local, 0, 8), remote)
    assert f"size {remote}" in str(raised.value)
    assert str(local) in str(raised.value)
    assert "--tensor-parallel-size" in str(raised.value)
