"""From two lists of blocks to the pairs that one read copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_commext.errors import ProtocolError

BlockIds = npt.NDArray[np.int64]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def missing_block_range(
    *, num_prompt_tokens: int, num_external_tokens: int, block_size: int
) -> tuple[int, int]:
    """Positions ``[first, end)`` of the prompt's blocks that a decode engine does not have yet.

    Args:
        num_prompt_tokens: tokens whose KV the prefill engine offers.
        num_external_tokens: how many of the last of them are to be loaded.
        block_size: tokens a block.
    """
    num_local_tokens = num_prompt_tokens - num_external_tokens
    return num_local_tokens // block_size, num_blocks_for(num_prompt_tokens, block_size)


def pair_blocks(
    local: Sequence[int],
    remote: Sequence[int],
    *,
    first: int,
    num_local_blocks: int,
    num_remote_blocks: int,
) -> tuple[BlockIds, BlockIds]:
    """Match local blocks with the remote blocks that hold the same tokens.

    Pairs come in ascending order of the remote id, so that NIXL can merge neighbours into one
    descriptor.

    Args:
        local: local block of each position ``first, first + 1, ...``.
        remote: remote block of each position from 0.
        first: position of the first local block in the prompt.
        num_local_blocks: blocks in the local cache.
        num_remote_blocks: blocks in the remote cache.

    Returns:
        Local and remote block ids, two arrays of equal length.

    Raises:
        ProtocolError: the remote list is too short, or an id is outside its cache.
    """
    end = first + len(local)
    if end > len(remote):
        raise ProtocolError(
            f"the prefill engine offers {len(remote)} blocks of the prompt, "
            f"the decode engine needs those from {first} to {end - 1}"
        )
    local_ids = _checked("local", local, num_local_blocks)
    remote_ids = _checked("remote", remote[first:end], num_remote_blocks)
    order = np.argsort(remote_ids, kind="stable")
    return local_ids[order], remote_ids[order]


def _checked(side: str, block_ids: Sequence[int], num_blocks: int) -> BlockIds:
    """The ids as an array; compared before that, as what came from a router may exceed 64 bits."""
    if block_ids and (min(block_ids) < 0 or max(block_ids) >= num_blocks):
        raise ProtocolError(
            f"{side} block ids run from {min(block_ids)} to {max(block_ids)}, "
            f"expected 0 to {num_blocks - 1}"
        )
    return np.asarray(block_ids, dtype=np.int64)
