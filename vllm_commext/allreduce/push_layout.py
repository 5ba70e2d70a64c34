"""Which of our two kernels serves a group, and what stands where in its memory. Pure arithmetic."""

from dataclasses import dataclass

from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.gpu.launch import WARP

ONE_SHOT, TWO_SHOT = "push_all_reduce", "push_two_shot"
PACKS = 4  # of a lane in a chunk
ONE_SHOT_CHUNKS = 8  # that a block handles at a time
TWO_SHOT_CHUNKS = 8  # the same, rounded down to as many of every rank, but at least one
FLAG_BYTES = 4
HALVES = 2


@dataclass(frozen=True)
class PushLayout:
    """Of a group's kernel and of the memory that its ranks map.

    First come two halves, then a flag of 32 bits for every chunk of a half. Between two ranks a half
    is the peer's message. Between more it is, from every peer, the chunks that this rank sums, and
    then the sums of the whole message.

    Attributes:
        world_size: ranks, 2 to 8.
        max_bytes: of the largest message.
    """

    world_size: int
    max_bytes: int

    @property
    def kernel(self) -> str:
        """`ONE_SHOT` or `TWO_SHOT`: its name and that of its file."""
        return ONE_SHOT if self.world_size == 2 else TWO_SHOT

    @property
    def share(self) -> int:
        """Chunks of every rank that a block of the two-shot kernel handles at a time."""
        return max(1, TWO_SHOT_CHUNKS // self.world_size)

    @property
    def block_chunks(self) -> int:
        """Chunks that a block handles at a time."""
        return ONE_SHOT_CHUNKS if self.kernel == ONE_SHOT else self.share * self.world_size

    @property
    def threads(self) -> int:
        """Of a block: a warp for a chunk's way out, and one for what comes of it."""
        if self.kernel == ONE_SHOT:
            return 2 * ONE_SHOT_CHUNKS * WARP
        return (2 * self.share * (self.world_size - 1) + self.share) * WARP

    @property
    def chunk_bytes(self) -> int:
        """What one warp moves at a time."""
        return WARP * PACKS * PACK_BYTES

    @property
    def max_chunks(self) -> int:
        """Of the largest message, rounded up to as many of every rank."""
        chunks = -(-self.max_bytes // self.chunk_bytes)
        return -(-chunks // self.world_size) * self.world_size

    @property
    def half_chunks(self) -> int:
        """Chunks of staging memory in one of the halves."""
        if self.kernel == ONE_SHOT:
            return self.max_chunks
        return self.max_chunks // self.world_size * (self.world_size - 1) + self.max_chunks

    @property
    def flags_offset(self) -> int:
        """Bytes before the flags."""
        return HALVES * self.half_chunks * self.chunk_bytes

    @property
    def num_bytes(self) -> int:
        """Of it all, on every rank."""
        return self.flags_offset + self.half_chunks * FLAG_BYTES

    def num_blocks(self, num_packs: int, most: int) -> int:
        """Blocks of a launch: enough for every chunk, but not more than `most`."""
        chunks = -(-num_packs * PACK_BYTES // self.chunk_bytes)
        return min(-(-chunks // self.block_chunks), most)

    def macros(self, element: int, rank: int) -> dict[str, int]:
        """The macros of the kernel, for the code of an element type."""
        macros = {"ELEMENT": element, "WORLD_SIZE": self.world_size, "RANK": rank, "PACKS": PACKS}
        return macros if self.kernel == ONE_SHOT else {**macros, "SHARE": self.share}
