"""Which blocks are offered and filled, against a list of a request's tokens made by hand."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.geometry.layout import FULL, STATE, WINDOW, Group
from vllm_commext.nixl.geometry.plan import (
    NULL_BLOCK,
    blocks_to_fill,
    blocks_to_offer,
    is_at_block_boundary,
    is_complete,
    keeps_every_token,
)

MAX_LENGTH = 4096


@dataclass(frozen=True)
class Case:
    """A request: ``block_of[group][token]`` is the block that holds what the group keeps of it,
    ``NULL_BLOCK`` where that is kept no longer."""

    groups: list[Group]
    block_ids: list[list[int]]
    block_of: list[list[int]]
    num_local_tokens: int
    num_tokens: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Groups with tokens take blocks of 1 to 3 times a unit; states are kept every so many
    blocks ("align") or once for the whole request ("none")."""
    unit = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    kinds = draw(st.lists(st.sampled_from([FULL, WINDOW, STATE]), min_size=4, max_size=4))
    groups = [
        Group(kind, MAX_LENGTH if kind == STATE and draw(st.booleans()) else unit * size)
        for kind, size in zip(kinds, sizes, strict=False)
    ]
    num_local = 6 * unit * draw(st.integers(0, 2))  # whole blocks of every size
    num_tokens = num_local + draw(st.integers(1, 30))
    ids = iter(draw(st.permutations(range(1, 400))))
    block_ids, block_of = [], []
    for group in groups:
        count = -(-num_tokens // group.block_size)
        kept = _first_kept(draw, group.kind, count, num_local // group.block_size)
        more = draw(st.integers(0, 2))  # blocks for tokens that are to be generated
        row = [NULL_BLOCK if place < kept else next(ids) for place in range(count + more)]
        block_ids.append(row)
        block_of.append([row[token // group.block_size] for token in range(num_tokens)])
    return Case(groups, block_ids, block_of, num_local, num_tokens)


def _first_kept(draw: st.DrawFn, kind: str, count: int, num_local: int) -> int:
    """Position from which a group keeps its blocks: a window has dropped some at the front."""
    if kind == FULL:
        return 0
    if kind == STATE:
        return draw(st.integers(max(0, count - 2), count - 1))
    return draw(st.integers(0, count - 1))


@given(cases())
def test_what_is_filled_is_what_is_missing(case: Case) -> None:
    found = blocks_to_fill(
        case.groups,
        case.block_ids,
        num_local_tokens=case.num_local_tokens,
        num_tokens=case.num_tokens,
    )
    assert len(found) == len(case.groups)
    for group, block_of, blocks in zip(case.groups, case.block_of, found, strict=True):
        if group.kind == STATE:
            assert blocks.first == (case.num_tokens - 1) // group.block_size
            assert list(blocks.block_ids) == [block_of[-1]]
            continue
        missing = range(case.num_local_tokens, case.num_tokens)
        expected = [block_of[token] for token in missing if block_of[token] != NULL_BLOCK]
        assert list(blocks.block_ids) == list(dict.fromkeys(expected))
        for offset, block_id in enumerate(blocks.block_ids):
            token = (blocks.first + offset) * group.block_size
            assert block_of[token] == block_id


@given(cases())
def test_what_is_offered_ends_with_the_block_of_the_last_token(case: Case) -> None:
    offered = blocks_to_offer(case.groups, case.block_ids, case.num_tokens)
    for group, block_of, ids in zip(case.groups, case.block_of, offered, strict=True):
        assert ids[-1] == block_of[-1]
        kept = [block for block in block_of if block != NULL_BLOCK]
        expected = [block_of[-1]] if group.kind == STATE else list(dict.fromkeys(kept))
        assert list(ids) == expected


@pytest.mark.parametrize(("kind", "ids"), [(STATE, [8, 0]), (WINDOW, [0, 0])])
def test_what_is_gone_is_not_offered(kind: str, ids: list[int]) -> None:
    groups = [Group(FULL, 4), Group(kind, 4)]
    assert blocks_to_offer(groups, [[5, 6], ids], 8) == ((5, 6), ())


@pytest.mark.parametrize(("kind", "expected"), [(FULL, False), (WINDOW, True), (STATE, False)])
def test_only_a_window_can_be_offered_without_blocks(kind: str, expected: bool) -> None:
    groups = [Group(FULL, 4), Group(kind, 4)]
    assert is_complete(groups, [[5, 6], []]) is expected
    assert is_complete(groups, [[5, 6], [7]])


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, True), (6, False), (8, False), (12, True), (24, True)]
)
def test_the_boundary_is_that_of_every_group_with_tokens(num_tokens: int, expected: bool) -> None:
    groups = [Group(FULL, 4), Group(WINDOW, 6), Group(STATE, 1000)]
    assert is_at_block_boundary(groups, num_tokens) == expected


@pytest.mark.parametrize(("kind", "expected"), [(FULL, True), (WINDOW, False), (STATE, False)])
def test_only_full_attention_keeps_every_token(kind: str, expected: bool) -> None:
    assert keeps_every_token([Group(FULL, 4), Group(kind, 4)]) is expected
