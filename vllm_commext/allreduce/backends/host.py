"""An all-reduce for GPUs that cannot reach each other: through host memory that all of them have
mapped; see ``csrc/cuda/host_parts.h``.

Each GPU writes its message into host memory and reads those of its peers from there, a piece as
soon as it has come. No copy engine, no host thread and no other library takes part.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.allreduce import names
from vllm_commext.allreduce.backends.backend import TIMEOUT_SECONDS, OwnKernels
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.gpu import ipc, launch
from vllm_commext.gpu.host_memory import HostMemory
from vllm_commext.gpu.launch import ELEMENT_CODES, WARP, Function, arguments_type
from vllm_commext.gpu.nvrtc import Program
from vllm_commext.gpu.peer_check import check_delivery

if TYPE_CHECKING:
    from vllm_commext.collective import Collective

ONE_SHOT, CHUNKS = "host_one_shot", "host_chunks"
UNIT_PACKS = 7 * WARP  # of a message, that one warp of the one-shot kernel moves at a time
UNIT_PARCELS = 8 * WARP  # of an outbox, that carry them
SHARE = 4  # units that a block of it handles at a time
TEAM = 256  # threads of the other kernel that move a chunk
UNROLL = 2  # packs of it that each of them moves
CHUNK_PACKS = TEAM * UNROLL
FLAG_PARCELS = 4  # a line of a processor's cache
HALVES = 2
# If many chunks are on their way up at the same time, all of them come late, and none comes down
# meanwhile: on two H100s half a MiB on its way was best for large messages, less for others.
MOST_BLOCKS, LEAST_BLOCKS = 66, 16
BLOCK_CHUNKS = 4  # that a block has in turn, if there are enough blocks
# Bytes a nanosecond, in both directions together, of a GPU of PCI Express 5, and what flags cost:
# of two ranks one wait, of more two, and a second way through host memory. Measured on two H100s,
# where the kernels are equally fast at about 300 KiB; for more ranks it is arithmetic.
LINK_BYTES, ONE_WAIT_NS, TWO_WAITS_NS = 64, 1350, 6200
MAX_MESSAGE_BYTES = 8 << 20  # of one launch
STATE_BYTES = 8
ARGUMENTS = "host_parts.h"
PLACES = ("half_packs", "first_flag", "first_message", "first_sum")  # of the layout


@dataclass(frozen=True)
class HostLayout:
    """Division of messages and outboxes among a group's kernels. Pure arithmetic.

    A half of an outbox has places for parcels of small messages, flags of chunks, the chunks of
    this rank's message, and where there are more than two ranks, the sums of those that it owns.
    Places are counted in packs, as parcels are as large.

    Attributes:
        world_size: ranks, 2 to 8.
        max_bytes: of the largest message.
    """

    world_size: int
    max_bytes: int

    @property
    def one_shot_bytes(self) -> int:
        """Bytes of the largest message for the kernel without flags.

        It moves 8/7 of a message up and as much of every peer's down; the other one a message up
        and 2 (W - 1) / W messages down.
        """
        ranks = self.world_size
        wait = ONE_WAIT_NS if ranks == 2 else TWO_WAITS_NS
        spared = ranks * ranks * 8 - 7 * (ranks + 2 * (ranks - 1))  # of a message, in 1 / (7 W)
        return min(wait * LINK_BYTES * 7 * ranks // spared, self.max_bytes)

    @property
    def max_chunks(self) -> int:
        return -(-self.max_bytes // (CHUNK_PACKS * PACK_BYTES))

    @property
    def owned_chunks(self) -> int:
        """Chunks of the largest message of which a rank's outbox has the sums."""
        return 0 if self.world_size == 2 else -(-self.max_chunks // self.world_size)

    @property
    def max_packs(self) -> int:
        return self.max_chunks * CHUNK_PACKS

    @property
    def first_flag(self) -> int:
        """Place in a half where the flags begin, behind the parcels of small messages."""
        return -(-self.one_shot_bytes // (UNIT_PACKS * PACK_BYTES)) * UNIT_PARCELS

    @property
    def first_message(self) -> int:
        """Place in a half where the chunks of the message begin."""
        return self.first_flag + (self.max_chunks + self.owned_chunks) * FLAG_PARCELS

    @property
    def first_sum(self) -> int:
        """Place in a half where the sums begin."""
        return self.first_message + self.max_packs

    @property
    def half_packs(self) -> int:
        return self.first_sum + self.owned_chunks * CHUNK_PACKS

    @property
    def num_bytes(self) -> int:
        """Bytes of an outbox."""
        return HALVES * self.half_packs * PACK_BYTES

    def kernel(self, num_packs: int) -> str:
        """Name of the kernel, and of its file, for a message of so many packs."""
        return ONE_SHOT if num_packs * PACK_BYTES <= self.one_shot_bytes else CHUNKS

    @property
    def kernels(self) -> tuple[str, ...]:
        """All kernels that messages of such a group need."""
        return tuple(dict.fromkeys(map(self.kernel, (1, self.max_packs))))

    def threads(self, kernel: str) -> int:
        """Threads of a block."""
        if kernel == ONE_SHOT:
            return 2 * SHARE * WARP
        return (2 if self.world_size == 2 else 3) * TEAM

    def num_blocks(self, kernel: str, num_packs: int, most: int = MOST_BLOCKS) -> int:
        """Blocks of a launch: each has something to do, and there are not more than `most`."""
        if kernel == ONE_SHOT:
            return min(-(-num_packs // (SHARE * UNIT_PACKS)), most)
        chunks = -(-num_packs // CHUNK_PACKS)
        each = 1 if self.world_size == 2 else self.world_size  # chunks that it handles at a time
        return min(-(-chunks // each), max(LEAST_BLOCKS, chunks // BLOCK_CHUNKS), most)

    def macros(self, kernel: str, element: int, rank: int) -> dict[str, int]:
        made = {"ELEMENT": element, "WORLD_SIZE": self.world_size, "RANK": rank}
        if kernel == ONE_SHOT:
            return {**made, "SHARE": SHARE}
        return {**made, "TEAM": TEAM, "UNROLL": UNROLL}


class HostBackend(OwnKernels):
    """A group's kernels with their memory; collective to create.

    Args:
        num_bytes: of the largest message; larger ones than `MAX_MESSAGE_BYTES` go in parts.

    Raises:
        UnsupportedError: memory cannot be had or not be registered with a GPU, a kernel not be
            compiled, or what a GPU stores does not reach another, on any rank; all ranks raise it.
    """

    name = names.HOST

    def __init__(self, num_bytes: int, collective: "Collective") -> None:
        self._rank = collective.rank
        self._layout = HostLayout(collective.world_size, min(num_bytes, MAX_MESSAGE_BYTES))
        super().__init__(collective.world_size, self._layout.max_packs)
        self._memory: HostMemory | None = None
        self._state = 0
        collective.agree(self._load)
        try:
            self._memory = HostMemory(self._layout.num_bytes, collective, marked=self._marked)
            collective.agree(self._make_counter)
            check_delivery(self._memory.addresses, collective)
        except Exception:
            self.destroy()
            raise
        self._memory.forget_files()
        places = {name: getattr(self._layout, name) for name in PLACES}
        self._arguments = arguments_type(ARGUMENTS, WORLD_SIZE=self._world_size)(
            state=self._state, timeout_ns=int(TIMEOUT_SECONDS * 1e9), **places
        )
        self._arguments.memory[:] = self._memory.addresses

    @property
    def _marked(self) -> int:
        """Bytes that the check of delivery wants to find empty."""
        return self._world_size * PACK_BYTES

    def _load(self) -> None:
        device = launch.current_device()
        self._functions = {
            (kernel, dtype): launch.load(
                Program(kernel),
                self._layout.macros(kernel, element, self._rank),
                self._layout.threads(kernel),
                device,
                programmatic=False,
            )
            for kernel in self._layout.kernels
            for dtype, element in ELEMENT_CODES.items()
        }

    def _make_counter(self) -> None:
        self._state = ipc.allocate(STATE_BYTES)

    def _launch(self, dtype: str, num_packs: int) -> tuple[Function, int]:
        kernel = self._layout.kernel(num_packs)
        return self._functions[kernel, dtype], self._layout.num_blocks(kernel, num_packs)

    def destroy(self) -> None:
        """Free the memory, once the GPU has done with it; a second call changes nothing."""
        import torch

        memory, self._memory = self._memory, None
        if memory is None:
            return
        torch.cuda.synchronize()
        memory.close()
        if self._state:
            ipc.free(self._state)
