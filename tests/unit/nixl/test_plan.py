"""Which blocks a read copies, against a walk over the tokens."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.plan import missing_block_range, num_blocks_for, pair_blocks

NUM_LOCAL, NUM_REMOTE = 60, 90


@dataclass(frozen=True)
class Case:
    """One decode request: a local prefix of whole blocks, the rest of the prompt elsewhere."""

    block_size: int
    num_tokens: int
    num_local_tokens: int
    local_blocks: list[int]
    remote_blocks: list[int]

    def walk(self) -> set[tuple[int, int]]:
        """(local, remote) block of every token that is missing."""
        return {
            (
                self.local_blocks[token // self.block_size],
                self.remote_blocks[token // self.block_size],
            )
            for token in range(self.num_local_tokens, self.num_tokens)
        }

    def pairs(self) -> list[tuple[int, int]]:
        first, end = missing_block_range(
            num_prompt_tokens=self.num_tokens,
            num_external_tokens=self.num_tokens - self.num_local_tokens,
            block_size=self.block_size,
        )
        local, remote = pair_blocks(
            self.local_blocks[first:end],
            self.remote_blocks,
            first=first,
            num_local_blocks=NUM_LOCAL,
            num_remote_blocks=NUM_REMOTE,
        )
        return list(zip(local.tolist(), remote.tolist(), strict=True))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_blocks = draw(st.integers(1, 20))
    num_tokens = num_blocks * block_size - draw(st.integers(0, block_size - 1))
    num_local_tokens = block_size * draw(st.integers(0, num_tokens // block_size))
    # Either side may hold blocks beyond the prompt: look-ahead slots, tokens decoded there.
    spare = draw(st.integers(0, 2))
    return Case(
        block_size,
        num_tokens,
        num_local_tokens,
        draw(st.permutations(range(NUM_LOCAL)))[: num_blocks + spare],
        draw(st.permutations(range(NUM_REMOTE)))[: num_blocks + draw(st.integers(0, 2))],
    )


@given(cases())
@settings(max_examples=60, deadline=None)
def test_every_missing_token_has_its_pair_and_no_other_block_is_touched(case: Case) -> None:
    pairs = case.pairs()
    assert set(pairs) == case.walk()
    assert len(pairs) == len(set(pairs))
    assert [remote for _, remote in pairs] == sorted(remote for _, remote in pairs)


def test_small_cases() -> None:
    assert num_blocks_for(0, 16) == 0
    assert num_blocks_for(1, 16) == num_blocks_for(16, 16) == 1
    assert num_blocks_for(17, 16) == 2
    for external, expected in [(33, (0, 3)), (17, (1, 3)), (10, (1, 3)), (1, (2, 3))]:
        found = missing_block_range(
            num_prompt_tokens=33, num_external_tokens=external, block_size=16
        )
        assert found == expected


def pair(local: list[int], remote: list[int], first: int = 0) -> None:
    pair_blocks(
        local, remote, first=first, num_local_blocks=NUM_LOCAL, num_remote_blocks=NUM_REMOTE
    )


def test_a_remote_list_that_is_too_short_is_refused_with_the_positions() -> None:
    with pytest.raises(ProtocolError, match="offers 3 blocks .* needs those from 2 to 4"):
        pair([1, 2, 3], [0, 1, 2], first=2)
    pair([1], [0, 1, 2], first=2)


@pytest.mark.parametrize("block", [-1, NUM_REMOTE, 1 << 40, 1 << 63, -(1 << 70)])
def test_remote_ids_outside_the_cache_are_refused(block: int) -> None:
    with pytest.raises(ProtocolError, match="remote block id"):
        pair([0, 1], [3, block])


@pytest.mark.parametrize("block", [-1, NUM_LOCAL, 1 << 40])
def test_local_ids_outside_the_cache_are_refused(block: int) -> None:
    with pytest.raises(ProtocolError, match="local block id"):
        pair([block, 1], [3, 4])
    pair([NUM_LOCAL - 1, 0], [NUM_REMOTE - 1, 0])
