"""A copy of the cache in host memory, for fabrics that do not reach the device's memory.

Peers read from the copy and into it.  A prefill worker copies a prompt's blocks out at the end of
the step that computes them; a decode worker copies blocks in when they have arrived.
"""

from collections.abc import Mapping, Sequence

import torch

_ALIGNMENT = 64


class HostBuffer:
    """Host memory of the size and form of a worker's cache.

    Attributes:
        views: a tensor a layer, of the shape, strides and dtype of the layer's cache.

    Args:
        caches: the layers' caches on the device.
        num_blocks: blocks that the cache manager hands out.
        layers: for each group, the names of its layers.
    """

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
        """Copy blocks to the host, a list a group."""
        self._copy(self._caches, self.views, block_ids)

    def restore(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Copy blocks to the device, a list a group."""
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
        """First-dimension indices of blocks, each of which is several neighbouring ones."""
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
