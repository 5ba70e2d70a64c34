"""An all-reduce kernel of our own for large messages; see ``cuda/push_all_reduce.cu``.

It pushes the message over the links and adds what arrives at the same time, so that it needs no
copy into memory that peers can read, which all other kernels that take a plain tensor make first.
"""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_commext.allreduce import limits, names
from vllm_commext.allreduce.backend import Ready
from vllm_commext.allreduce.message import PACK_BYTES, Message
from vllm_commext.gpu import launch
from vllm_commext.gpu.collective import await_others
from vllm_commext.gpu.ipc import IpcBuffer
from vllm_commext.gpu.launch import ELEMENT_CODES, WARP
from vllm_commext.gpu.nvrtc import Program

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from vllm_commext.allreduce.lockstep import Lockstep

PROGRAM = Program("push_all_reduce", Path(__file__).parent / "cuda")
PUSHERS = 8  # warps of a block; as many add
PACKS = 4  # of a lane in a chunk
BLOCKS_PER_MULTIPROCESSOR = 2
MAX_MESSAGE_BYTES = 64 << 20
CLEANUP_SECONDS = 5.0
TIMEOUT_SECONDS = 600.0  # as NCCL's: a rank may be compiling


def arguments_type(world_size: int) -> type[ctypes.Structure]:
    """``Args`` of the kernel, field by field."""

    class Arguments(ctypes.Structure):
        _fields_ = (
            ("input", ctypes.c_uint64),
            ("output", ctypes.c_uint64),
            ("state", ctypes.c_uint64),
            ("num_packs", ctypes.c_uint64),
            ("half_packs", ctypes.c_uint64),
            ("flags_offset", ctypes.c_uint64),
            ("flags_stride", ctypes.c_uint64),
            ("timeout_ns", ctypes.c_uint64),
            ("memory", ctypes.c_uint64 * world_size),
        )

    return Arguments


def macros(dtype: str, world_size: int, rank: int) -> dict[str, int]:
    """The macros of ``cuda/push_all_reduce.cu``."""
    element = ELEMENT_CODES[dtype]
    return {"ELEMENT": element, "WORLD_SIZE": world_size, "RANK": rank, "PACKS": PACKS}


class PushLayout:
    """What stands where in the memory that peers map. Pure arithmetic.

    First come two halves, each with a message from every peer; then, for every peer, a flag of 32
    bits a chunk.

    Attributes:
        chunk_packs: packs of 16 bytes that one warp moves at a time.
        half_packs: packs of one peer's part of a half.
        flags_offset: bytes before the flags.
        flags_stride: flags of one peer.
        num_bytes: of it all.

    Args:
        world_size: ranks.
        max_bytes: of the largest message, rounded up to whole chunks.
    """

    def __init__(self, world_size: int, max_bytes: int) -> None:
        self.chunk_packs = WARP * PACKS
        chunk_bytes = self.chunk_packs * PACK_BYTES
        self.flags_stride = -(-max_bytes // chunk_bytes)
        self.half_packs = self.flags_stride * self.chunk_packs
        self.flags_offset = 2 * (world_size - 1) * self.half_packs * PACK_BYTES
        self.num_bytes = self.flags_offset + (world_size - 1) * self.flags_stride * 4

    def num_blocks(self, num_packs: int, most: int) -> int:
        """Blocks of a launch: a warp a chunk, but not more than `most`."""
        chunks = -(-num_packs // self.chunk_packs)
        return min(-(-chunks // PUSHERS), most)


class PushBackend(Ready):
    """The kernel with its memory; collective to create.

    It serves one stream at a time. A rank that waits longer than `TIMEOUT_SECONDS` for a peer ends
    its kernel with an error of CUDA's, and with it the process's use of the GPU.

    Args:
        group: sends objects without a GPU.
        num_bytes: of the largest message.
        lockstep: of the group.

    Raises:
        UnsupportedError: a peer's memory cannot be mapped or the kernel not be compiled, on any
            rank; all ranks raise it.
    """

    name = names.PUSH

    def __init__(self, group: "ProcessGroup", num_bytes: int, lockstep: "Lockstep") -> None:
        self._group, self._max_bytes = group, num_bytes
        self._world_size, self._rank = lockstep.world_size, lockstep.rank
        self._layout = PushLayout(self._world_size, num_bytes)
        lockstep.agree(self._load)
        self._buffer: IpcBuffer | None = IpcBuffer(
            self._rank, self._world_size, self._layout.num_bytes, group
        )
        lockstep.agree(self._fill_arguments)

    def _load(self) -> None:
        device = launch.current_device()
        self._most_blocks = BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors
        self._functions = {
            dtype: launch.load(
                *(PROGRAM, macros(dtype, self._world_size, self._rank), 2 * PUSHERS * WARP),
                device,
                programmatic=False,
            )
            for dtype in ELEMENT_CODES
        }

    def _fill_arguments(self) -> None:
        import torch

        assert self._buffer is not None
        self._state = torch.zeros(2, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        made = arguments_type(self._world_size)()
        made.state = self._state.data_ptr()
        made.half_packs, made.flags_offset = self._layout.half_packs, self._layout.flags_offset
        made.flags_stride = self._layout.flags_stride
        made.timeout_ns = int(TIMEOUT_SECONDS * 1e9)
        made.memory[:] = self._buffer.serialize()
        self._arguments = made

    def takes(self, message: Message) -> bool:
        """Whole packs of 16 bytes, up to the memory's size."""
        return limits.push(message, self._world_size, self._max_bytes)

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """One launch."""
        import torch

        out = torch.empty_like(tensor)
        num_packs = tensor.numel() * tensor.itemsize // PACK_BYTES
        made = self._arguments
        made.input, made.output, made.num_packs = tensor.data_ptr(), out.data_ptr(), num_packs
        self._functions[str(tensor.dtype).removeprefix("torch.")].launch(
            made,
            self._layout.num_blocks(num_packs, self._most_blocks),
            torch.cuda.current_stream().cuda_stream,
        )
        return out

    def destroy(self) -> None:
        """Unmap and free the memory; a second call changes nothing."""
        import torch

        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        torch.cuda.synchronize()
        buffer.close_peers()
        await_others(self._group, CLEANUP_SECONDS)
        buffer.cleanup()
