"""vLLM's tensor arena beside our queue: slots of shared memory into which the engine copies a large
CPU tensor once, and of which each worker gets a view.

What is large, the slots and when they are free again are vLLM's own code. A message of ours holds
what that pickles in place of the tensor.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm_commext.shm.reducers import PROTOCOL, is_dense, reduce_tensor

ArenaHandle = tuple[int, int, int, str]
Reducer = Callable[[Any], Any]


class TensorArena:
    """One end of an arena: the writer's, or, with its handle, that of the reader in `place`.

    Attributes:
        handle: what a reader's process needs.
        flush_releases: frees the slots whose tensors are gone; a reader calls it before each read.

    Raises:
        RuntimeError: /dev/shm has no room for it (2 GiB in vLLM 0.32).
    """

    def __init__(self, n_readers: int, handle: ArenaHandle | None = None, place: int = -1) -> None:
        from vllm.distributed.device_communicators import shm_tensor_arena

        self._stock: Any = shm_tensor_arena
        if handle is None:
            self._arena = self._stock.ShmTensorArena(n_readers)
        else:
            self._arena = self._stock.ShmTensorArena(*handle, reader_rank=place)
            if hasattr(self._arena, "shared_memory"):  # else what needs it fails, when it comes
                self._stock._TENSOR_ARENAS[handle[-1]] = self._arena  # where unpickling looks
        self.handle: ArenaHandle = handle or self._arena.handle()
        self.flush_releases: Callable[[], None] = self._arena.flush_releases

    def reducers(self) -> dict[type, Reducer]:
        """The writer's, by type: of a tensor that has got a slot the slot, of others as usual."""
        import torch

        only_an_arena = SimpleNamespace(arena=self._arena)  # all that vLLM's pickler needs for it
        to_slot = partial(self._stock._ArenaPickler.reducer_override, only_an_arena)

        def reduced(tensor: Any, usual: Reducer) -> Any:
            found = to_slot(tensor) if is_dense(tensor) else NotImplemented
            return usual(tensor) if found is NotImplemented else found

        return {
            torch.Tensor: lambda tensor: reduced(tensor, reduce_tensor),
            torch.nn.Parameter: lambda one: reduced(one, lambda one: one.__reduce_ex__(PROTOCOL)),
        }
