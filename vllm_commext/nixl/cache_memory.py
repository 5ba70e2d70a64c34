"""A copy of a worker's cache in host memory, and the zeroing of the last blocks of loads.

Where a fabric does not reach the device's memory, peers read from the copy and into it. A prefill
worker copies a prompt's blocks out at the end of the step that computes them; a decode worker
copies blocks in when they have arrived.

vLLM zeroes new blocks of models with states, or with caches of several precisions: what another
group has left there can be no number at all in this one's format, and attention multiplies what
lies behind the last token by zero. It leaves out the blocks of groups that a connector loads. A
read between engines of different sizes ends with the cell of the last token, not with its block:
that block is zeroed here before it is read into.
"""

from collections.abc import Mapping, Sequence

import torch

from vllm_commext.nixl.geometry.layout import STATE, Group
from vllm_commext.nixl.requests import Load

_ALIGNMENT = 64


class HostBuffer:
    """Host memory of the size and form of a worker's cache."""

    def __init__(
        self, caches: Mapping[str, torch.Tensor], num_blocks: int, layers: Sequence[Sequence[str]]
    ) -> None:
        self._caches = caches
        self._num_blocks = num_blocks
        self._layers = layers
        memory = {
            cache.untyped_storage().data_ptr(): _host_bytes(cache) for cache in caches.values()
        }
        self.views = {
            name: _view(memory[cache.untyped_storage().data_ptr()], cache)
            for name, cache in caches.items()
        }

    def save(self, block_ids: Sequence[Sequence[int]]) -> None:
        self._copy(self._caches, self.views, block_ids)

    def restore(self, block_ids: Sequence[Sequence[int]]) -> None:
        self._copy(self.views, self._caches, block_ids)

    def _copy(
        self,
        source: Mapping[str, torch.Tensor],
        target: Mapping[str, torch.Tensor],
        block_ids: Sequence[Sequence[int]],
    ) -> None:
        for ids, layers in zip(block_ids, self._layers, strict=True):
            for name in layers if ids else ():
                rows = self._rows(ids, source[name].shape[0])
                moved = source[name].index_select(0, rows.to(source[name].device))
                target[name].index_copy_(
                    0, rows.to(target[name].device), moved.to(target[name].device)
                )

    def _rows(self, block_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        rows_per_block = num_rows // self._num_blocks
        first = torch.tensor(block_ids, dtype=torch.int64)[:, None] * rows_per_block
        return (first + torch.arange(rows_per_block)).flatten()


def _host_bytes(cache: torch.Tensor) -> torch.Tensor:
    num_bytes = -(-cache.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    pinned = cache.device.type == "cuda"
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _view(memory: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(
        memory.view(cache.dtype), cache.shape, cache.stride(), cache.storage_offset()
    )


class LastBlocks:
    """A worker's attention caches, block by block."""

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
