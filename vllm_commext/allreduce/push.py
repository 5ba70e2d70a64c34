"""All-reduce kernels of our own for large messages; see ``csrc/cuda/push_all_reduce.cu`` for two
ranks and ``csrc/cuda/push_two_shot.cu`` for more.

They push the message over the links and add what arrives at the same time, so that they need no
copy into memory that peers can read, which all other kernels that take a plain tensor make first.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.backend import Ready
from vllm_commext.allreduce.limits import PACK_BYTES, Message
from vllm_commext.gpu import launch
from vllm_commext.gpu.ipc import EMPTY, IpcBuffer, allocate, check_delivery, free
from vllm_commext.gpu.launch import ELEMENT_CODES, WARP, Program, arguments_type

if TYPE_CHECKING:
    import torch

    from vllm_commext.collective import Collective

ONE_SHOT, TWO_SHOT = "push_all_reduce", "push_two_shot"
CHUNK_PACKS = WARP  # that one warp moves at a time
ONE_SHOT_CHUNKS = 8  # that a block handles at a time
TWO_SHOT_CHUNKS = 8  # the same, rounded down to as many of every rank, but at least one
HALVES = 2
CLEANUP_SECONDS = 5.0
BLOCKS_PER_MULTIPROCESSOR = 2
MAX_MESSAGE_BYTES = 64 << 20
ARGUMENTS = "push_args.h"
TIMEOUT_SECONDS = 600.0  # as NCCL's: a rank may be compiling


@dataclass(frozen=True)
class PushLayout:
    """Division of a group's memory, and the kernel that uses it. Pure arithmetic.

    It has two halves. Between two ranks, a half is the peer's message. Between more it is, from
    every peer, the chunks that this rank sums, and then the sums of the whole message."""

    world_size: int  # 2 to 8
    max_bytes: int  # of the largest message

    @property
    def kernel(self) -> str:
        return ONE_SHOT if self.world_size == 2 else TWO_SHOT

    @property
    def share(self) -> int:
        """Chunks of every rank that a block of the two-shot kernel handles at a time."""
        return max(1, TWO_SHOT_CHUNKS // self.world_size)

    @property
    def block_chunks(self) -> int:
        return ONE_SHOT_CHUNKS if self.kernel == ONE_SHOT else self.share * self.world_size

    @property
    def threads(self) -> int:
        """Threads of a block: a warp for a chunk's way out, and one for what comes of it."""
        if self.kernel == ONE_SHOT:
            return 2 * ONE_SHOT_CHUNKS * WARP
        return (2 * self.share * (self.world_size - 1) + self.share) * WARP

    @property
    def max_packs(self) -> int:
        """Packs of the largest message, in whole chunks of every rank."""
        everybody = CHUNK_PACKS * self.world_size
        return -(-self.max_bytes // (everybody * PACK_BYTES)) * everybody

    @property
    def half_packs(self) -> int:
        if self.kernel == ONE_SHOT:
            return self.max_packs
        return self.max_packs // self.world_size * (self.world_size - 1) + self.max_packs

    @property
    def num_bytes(self) -> int:
        return HALVES * self.half_packs * PACK_BYTES

    def num_blocks(self, num_packs: int, most: int) -> int:
        chunks = -(-num_packs // CHUNK_PACKS)
        return min(-(-chunks // self.block_chunks), most)

    def macros(self, element: int, rank: int) -> dict[str, int]:
        macros = {"ELEMENT": element, "WORLD_SIZE": self.world_size, "RANK": rank}
        return macros if self.kernel == ONE_SHOT else {**macros, "SHARE": self.share}


class PushMemory:
    """One rank's staging memory that kernels push packs into, with that of its peers mapped, and
    the counter of calls; collective to create.

    It serves one stream at a time. Any of the kernels may make the next call, as long as all ranks
    take the same; they divide a half of it as each needs.

    All ranks raise UnsupportedError where on one of them a peer's memory cannot be mapped, or what
    is stored there does not arrive.

    Attributes:
        half_packs: packs of 16 bytes in one of its halves.
        addresses: of each rank's memory in this process, in the order of ranks.
        state: address of the number of the last call, followed by how many blocks came since.
    """

    def __init__(self, layout: PushLayout, collective: "Collective") -> None:
        self.half_packs = layout.half_packs
        self._buffer: IpcBuffer | None = IpcBuffer(collective, layout.num_bytes, fill=EMPTY)
        self.addresses, self.state = list(self._buffer.peer_ptrs), 0
        try:
            collective.agree(self._make_counter)
            check_delivery(self.addresses, collective)
        except Exception:
            self._release(self._buffer)
            raise

    def _make_counter(self) -> None:
        self.state = allocate(8)

    def _release(self, buffer: IpcBuffer) -> None:
        buffer.cleanup(CLEANUP_SECONDS)
        if self.state:
            free(self.state)

    def destroy(self) -> None:
        import torch

        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        torch.cuda.synchronize()
        self._release(buffer)


class PushBackend(Ready):
    """A group's kernel with its memory, which other kernels of ours may use too; collective to
    create. One launch takes messages of `num_bytes`, on one stream at a time. A rank that waits
    longer than `TIMEOUT_SECONDS` for a peer ends its kernel with an error of CUDA's, and with it
    the process's use of the GPU. UnsupportedError as `PushMemory`, or where the kernel cannot be
    compiled."""

    name = limits.PUSH

    def __init__(self, num_bytes: int, collective: "Collective") -> None:
        self._rank = collective.rank
        self._layout = PushLayout(collective.world_size, num_bytes)
        collective.agree(self._load)
        self.memory = PushMemory(self._layout, collective)
        self._arguments = arguments_type(ARGUMENTS, WORLD_SIZE=collective.world_size)(
            state=self.memory.state,
            max_packs=self._layout.max_packs,
            timeout_ns=int(TIMEOUT_SECONDS * 1e9),
        )
        self._arguments.memory[:] = self.memory.addresses

    def _load(self) -> None:
        device = launch.current_device()
        self._most_blocks = BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors
        source = Program(self._layout.kernel)
        self._functions = {
            dtype: launch.load(
                *(source, self._layout.macros(element, self._rank), self._layout.threads, device),
                programmatic=False,
            )
            for dtype, element in ELEMENT_CODES.items()
        }

    def takes(self, message: Message) -> bool:
        return limits.push(message, self._layout.world_size)

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Launch once, or once for each part of a message that is larger than the memory."""
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
        self.memory.destroy()
