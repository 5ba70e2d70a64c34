"""Empties the last blocks of a load before they are read into.

vLLM zeroes new blocks of models with states, or with caches of several precisions: what another
group has left there can be no number at all in this one's format, and attention multiplies what
lies behind the last token by zero.  It leaves out the blocks of groups that a connector loads.  A
read between engines of different sizes ends with the cell of the last token, not with its block.
"""

from collections.abc import Mapping, Sequence

import torch

from vllm_commext.nixl.geometry.layout import STATE, Group
from vllm_commext.nixl.requests import Load


class LastBlocks:
    """A worker's attention caches, block by block.

    Args:
        caches: layer name to its cache ``[rows, ...]``, as many rows a block in each.
        layers: for each group, the names of its layers.
        groups: the groups.
        num_blocks: blocks that the cache manager hands out.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        layers: Sequence[Sequence[str]],
        groups: Sequence[Group],
        num_blocks: int,
    ) -> None:
        self._num_blocks = num_blocks
        self._groups = [
            (group, [caches[name] for name in names])
            for group, names in zip(groups, layers, strict=True)
        ]
        device = next(iter(caches.values())).device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def clear(self, load: Load) -> None:
        """Zero the block of the last token in each group of which that token does not fill the
        block; returns when that is done."""
        if self._stream is None:
            self._zero(load)
            return
        with self._stream:
            self._zero(load)
        self._stream.synchronize()

    def _zero(self, load: Load) -> None:
        for (group, caches), blocks in zip(self._groups, load.blocks, strict=True):
            if (
                group.kind == STATE
                or not blocks.block_ids
                or not load.num_tokens % group.block_size
            ):
                continue
            for cache in caches:
                rows = cache.shape[0] // self._num_blocks
                first = blocks.block_ids[-1] * rows
                cache[first : first + rows].zero_()
