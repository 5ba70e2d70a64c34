"""Which of a request's blocks a prefill engine offers and a decode engine fills, group by group.

vLLM lists a request's blocks by position; where a group no longer needs a position it puts the null
block there, whose id is 0.  A state is kept in the block of the last token.
"""

from collections.abc import Sequence

from vllm_commext.nixl.geometry.layout import FULL, STATE, WINDOW, Group
from vllm_commext.nixl.geometry.plan import Blocks, num_blocks_for

NULL_BLOCK = 0


def has_state(groups: Sequence[Group]) -> bool:
    """Whether some layers keep a state, which cannot be cut back to fewer tokens."""
    return any(group.kind == STATE for group in groups)


def keeps_every_token(groups: Sequence[Group]) -> bool:
    """Whether the last token can be computed again from the cache after it: a state cannot go back,
    and a window may have dropped the block of the first token that the last one attends to."""
    return all(group.kind == FULL for group in groups)


def blocks_to_fill(
    groups: Sequence[Group],
    block_ids: Sequence[Sequence[int]],
    *,
    num_local_tokens: int,
    num_tokens: int,
) -> tuple[Blocks, ...]:
    """The decode side's blocks, a group at a time.

    Args:
        block_ids: blocks of each group, by position.
        num_local_tokens: tokens that this engine has already; whole blocks of each group that has
            tokens.
        num_tokens: tokens after the load.
    """
    found: list[Blocks] = []
    for group, ids in zip(groups, block_ids, strict=True):
        end = num_blocks_for(num_tokens, group.block_size)
        first = end - 1 if group.kind == STATE else num_local_tokens // group.block_size
        while first < min(end, len(ids)) and ids[first] == NULL_BLOCK:
            first += 1
        found.append(Blocks(first, list(ids[first:end])))
    return tuple(found)


def blocks_to_offer(
    groups: Sequence[Group], block_ids: Sequence[Sequence[int]], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The prefill side's blocks, a group at a time: all that are left, ending with that of the last
    token; the arguments are those of ``blocks_to_fill``."""
    filled = blocks_to_fill(groups, block_ids, num_local_tokens=0, num_tokens=num_tokens)
    return tuple(tuple(blocks.block_ids) for blocks in filled)


def is_complete(groups: Sequence[Group], offered: Sequence[Sequence[int]]) -> bool:
    """Whether nothing that a reader needs is missing; only a window can be empty, where the next
    token begins a new one."""
    return all(
        len(ids) > 0 or group.kind == WINDOW for group, ids in zip(groups, offered, strict=True)
    )


def is_at_block_boundary(groups: Sequence[Group], num_tokens: int) -> bool:
    """Whether the tokens end with a block in every group that has tokens."""
    return all(num_tokens % group.block_size == 0 for group in groups if group.kind != STATE)
