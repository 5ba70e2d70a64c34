"""All-reduce kernels of our own for large messages; see ``csrc/cuda/push_all_reduce.cu`` for two
ranks and ``csrc/cuda/push_two_shot.cu`` for more.

They push the message over the links and add what arrives at the same time, so that they need no
copy into memory that peers can read, which all other kernels that take a plain tensor make first.
"""

import ctypes
from typing import TYPE_CHECKING

from vllm_commext.allreduce import names
from vllm_commext.allreduce.backends import limits
from vllm_commext.allreduce.backends.backend import Ready
from vllm_commext.allreduce.backends.push_layout import PushLayout
from vllm_commext.allreduce.backends.push_memory import PushMemory
from vllm_commext.allreduce.message import PACK_BYTES, Message
from vllm_commext.gpu import launch
from vllm_commext.gpu.launch import ELEMENT_CODES
from vllm_commext.gpu.nvrtc import Program

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from vllm_commext.allreduce.lockstep import Lockstep

BLOCKS_PER_MULTIPROCESSOR = 2
MAX_MESSAGE_BYTES = 64 << 20
TIMEOUT_SECONDS = 600.0  # as NCCL's: a rank may be compiling


def program(layout: PushLayout) -> Program:
    """The kernel's source."""
    return Program(layout.kernel)


def arguments_type(world_size: int) -> type[ctypes.Structure]:
    """``Args`` of the kernels, field by field."""

    class Arguments(ctypes.Structure):
        _fields_ = (
            ("input", ctypes.c_uint64),
            ("output", ctypes.c_uint64),
            ("state", ctypes.c_uint64),
            ("num_packs", ctypes.c_uint32),
            ("max_packs", ctypes.c_uint32),
            ("timeout_ns", ctypes.c_uint64),
            ("memory", ctypes.c_uint64 * world_size),
        )

    return Arguments


class PushBackend(Ready):
    """A group's kernel with its memory; collective to create.

    It serves one stream at a time. A rank that waits longer than `TIMEOUT_SECONDS` for a peer ends
    its kernel with an error of CUDA's, and with it the process's use of the GPU.

    Args:
        group: sends objects without a GPU.
        num_bytes: of the largest message that one launch takes.
        lockstep: of the group.

    Attributes:
        memory: which other kernels of ours may use too.

    Raises:
        UnsupportedError: a peer's memory cannot be mapped or the kernel not be compiled, on any
            rank; all ranks raise it.
    """

    name = names.PUSH

    def __init__(self, group: "ProcessGroup", num_bytes: int, lockstep: "Lockstep") -> None:
        self._world_size, self._rank = lockstep.world_size, lockstep.rank
        self._layout = PushLayout(self._world_size, num_bytes)
        lockstep.agree(self._load)
        self.memory = PushMemory(group, self._layout, lockstep)
        made = arguments_type(self._world_size)()
        made.state = self.memory.state
        made.max_packs = self._layout.max_packs
        made.timeout_ns = int(TIMEOUT_SECONDS * 1e9)
        made.memory[:] = self.memory.addresses
        self._arguments = made

    def _load(self) -> None:
        device = launch.current_device()
        self._most_blocks = BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors
        source = program(self._layout)
        self._functions = {
            dtype: launch.load(
                *(source, self._layout.macros(element, self._rank), self._layout.threads, device),
                programmatic=False,
            )
            for dtype, element in ELEMENT_CODES.items()
        }

    def takes(self, message: Message) -> bool:
        """Rows of whole packs of 16 bytes."""
        return limits.push(message, self._world_size)

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """One launch, or one for each part of a message that is larger than the memory."""
        import torch

        out = torch.empty_like(tensor)
        stream = torch.cuda.current_stream().cuda_stream
        function = self._functions[str(tensor.dtype).removeprefix("torch.")]
        made, num_packs = self._arguments, tensor.numel() * tensor.itemsize // PACK_BYTES
        for first in range(0, num_packs, self._layout.max_packs):
            made.input = tensor.data_ptr() + first * PACK_BYTES
            made.output = out.data_ptr() + first * PACK_BYTES
            made.num_packs = min(self._layout.max_packs, num_packs - first)
            blocks = self._layout.num_blocks(made.num_packs, self._most_blocks)
            function.launch(made, blocks, stream)
        return out

    def destroy(self) -> None:
        """Unmap and free the memory; a second call changes nothing."""
        self.memory.destroy()
