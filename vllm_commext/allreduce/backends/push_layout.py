"""Which of our two kernels serves a group, and what stands where in its memory. Pure arithmetic."""

from dataclasses import dataclass

from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.gpu.launch import WARP

ONE_SHOT, TWO_SHOT = "push_all_reduce", "push_two_shot"
CHUNK_PACKS = WARP  # that one warp moves at a time
ONE_SHOT_CHUNKS = 8  # that a block handles at a time
TWO_SHOT_CHUNKS = 8  # the same, rounded down to as many of every rank, but at least one
HALVES = 2


@dataclass(frozen=True)
class PushLayout:
    """Of a group's kernel and of the memory that its ranks map.

    It has two halves. Between two ranks, a half is the peer's message. Between more it is, from
    every peer, the chunks that this rank sums, and then the sums of the whole message.

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
    def max_packs(self) -> int:
        """Of the largest message, rounded up to as many whole chunks of every rank."""
        everybody = CHUNK_PACKS * self.world_size
        return -(-self.max_bytes // (everybody * PACK_BYTES)) * everybody

    @property
    def half_packs(self) -> int:
        """Packs of staging memory in one of the halves."""
        if self.kernel == ONE_SHOT:
            return self.max_packs
        return self.max_packs // self.world_size * (self.world_size - 1) + self.max_packs

    @property
    def num_bytes(self) -> int:
        """Of it all, on every rank."""
        return HALVES * self.half_packs * PACK_BYTES

    def num_blocks(self, num_packs: int, most: int) -> int:
        """Blocks of a launch: enough for every chunk, but not more than `most`."""
        chunks = -(-num_packs // CHUNK_PACKS)
        return min(-(-chunks // self.block_chunks), most)

    def macros(self, element: int, rank: int) -> dict[str, int]:
        """The macros of the kernel, for the code of an element type."""
        macros = {"ELEMENT": element, "WORLD_SIZE": self.world_size, "RANK": rank}
        return macros if self.kernel == ONE_SHOT else {**macros, "SHARE": self.share}
