"""torch's symmetric memory: a buffer that every rank has mapped, and three kernels over it.

vLLM switches symmetric memory off where there is no multicast. These kernels need none.
"""

from typing import TYPE_CHECKING

from vllm_commext.allreduce import multicast, names
from vllm_commext.allreduce.backends import limits
from vllm_commext.allreduce.backends.backend import Ready
from vllm_commext.allreduce.message import Message

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from vllm_commext.allreduce.lockstep import Lockstep


class SymmetricBuffer:
    """A buffer that messages are copied into, shared by the backends of one group.

    Creating it is collective. It serves one stream at a time: each kernel ends only when all ranks
    have read what they need, so the next copy on the same stream may overwrite it.

    Args:
        group: the group's name is what torch's rendezvous goes by.
        device: this rank's GPU.
        num_bytes: of the largest message.

    Raises:
        UnsupportedError: it cannot be allocated or mapped on some rank; all ranks raise it.
    """

    def __init__(
        self, group: "ProcessGroup", device: "torch.device", num_bytes: int, lockstep: "Lockstep"
    ) -> None:
        self.group_name, self.num_bytes, self.world_size = (
            *(group.group_name, num_bytes),
            lockstep.world_size,
        )
        self._device = device
        lockstep.agree(self._allocate)
        lockstep.agree(self._rendezvous)

    def _allocate(self) -> None:
        import torch
        from torch.distributed import _symmetric_memory

        self._memory: torch.Tensor | None = _symmetric_memory.empty(
            self.num_bytes, dtype=torch.uint8, device=self._device
        )
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def _rendezvous(self) -> None:
        from torch.distributed import _symmetric_memory

        assert self._memory is not None
        with multicast.torch_guard():
            self._handle = _symmetric_memory.rendezvous(self._memory, self.group_name)

    def first(self, num_elements: int, dtype: "torch.dtype") -> "torch.Tensor":
        """The buffer's first elements as a one-dimensional tensor of that dtype."""
        view = self._views.get(dtype)
        if view is None:
            assert self._memory is not None, "the buffer was destroyed"
            view = self._views[dtype] = self._memory.view(dtype)
        return view[:num_elements]

    def destroy(self) -> None:
        """Let go of the memory; torch unmaps it with the last reference."""
        self._views.clear()
        self._memory = self._handle = None


class _Symmetric(Ready):
    name: str

    def __init__(self, buffer: SymmetricBuffer) -> None:
        self._buffer = buffer

    def destroy(self) -> None:
        """Let go of the shared buffer; a second call changes nothing."""
        self._buffer.destroy()


class SymmetricOneShot(_Symmetric):
    """Every rank reads the whole message of every other; the kernel makes the copy itself."""

    name = names.SYMM_ONE_SHOT

    def takes(self, message: Message) -> bool:
        """bfloat16 and float32 up to the buffer's size."""
        return limits.symm_one_shot(message, self._buffer.world_size, self._buffer.num_bytes)

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """One launch."""
        import torch

        out = torch.empty_like(tensor)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(
            self._buffer.first(tensor.numel(), tensor.dtype),
            *(tensor.view(-1), "sum", self._buffer.group_name, out.view(-1)),
        )
        return out


class SymmetricTwoShot(_Symmetric):
    """Each rank sums its share and reads the others' shares into a fresh output."""

    name = names.SYMM_TWO_SHOT

    def takes(self, message: Message) -> bool:
        """bfloat16 and float32 up to the buffer's size, on 2, 4 or 8 ranks."""
        return limits.symm_two_shot(message, self._buffer.world_size, self._buffer.num_bytes)

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A copy and a launch."""
        import torch

        out = torch.empty_like(tensor)
        staged = self._buffer.first(tensor.numel(), tensor.dtype)
        staged.copy_(tensor.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_out(
            staged, "sum", self._buffer.group_name, out.view(-1)
        )
        return out


class SymmetricTwoShotInPlace(SymmetricTwoShot):
    """Each rank sums its share and writes it to the others; a second copy brings the result out."""

    name = names.SYMM_TWO_SHOT_INPLACE

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A copy, a launch and a copy."""
        import torch

        out = torch.empty_like(tensor)
        staged = self._buffer.first(tensor.numel(), tensor.dtype)
        staged.copy_(tensor.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(staged, "sum", self._buffer.group_name)
        out.view(-1).copy_(staged)
        return out
