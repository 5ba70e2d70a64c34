"""How the kernels that sum through host memory divide messages and outboxes. Pure arithmetic."""

from dataclasses import dataclass

from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.gpu.launch import WARP

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


@dataclass(frozen=True)
class HostLayout:
    """Of a group's kernels and of the outboxes that its ranks map.

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
        """Of the largest message for the kernel without flags.

        It moves 8/7 of a message up and as much of every peer's down; the other one a message up
        and 2 (W - 1) / W messages down.
        """
        ranks = self.world_size
        wait = ONE_WAIT_NS if ranks == 2 else TWO_WAITS_NS
        spared = ranks * ranks * 8 - 7 * (ranks + 2 * (ranks - 1))  # of a message, in 1 / (7 W)
        return min(wait * LINK_BYTES * 7 * ranks // spared, self.max_bytes)

    @property
    def max_chunks(self) -> int:
        """Of the largest message."""
        return -(-self.max_bytes // (CHUNK_PACKS * PACK_BYTES))

    @property
    def owned_chunks(self) -> int:
        """Of the largest message, those of which a rank's outbox has the sums."""
        return 0 if self.world_size == 2 else -(-self.max_chunks // self.world_size)

    @property
    def max_packs(self) -> int:
        """Of the largest message, in whole chunks."""
        return self.max_chunks * CHUNK_PACKS

    @property
    def first_flag(self) -> int:
        """Where in a half the flags begin, behind the parcels of small messages."""
        return -(-self.one_shot_bytes // (UNIT_PACKS * PACK_BYTES)) * UNIT_PARCELS

    @property
    def first_message(self) -> int:
        """Where in a half the chunks of the message begin."""
        return self.first_flag + (self.max_chunks + self.owned_chunks) * FLAG_PARCELS

    @property
    def first_sum(self) -> int:
        """Where in a half the sums begin."""
        return self.first_message + self.max_packs

    @property
    def half_packs(self) -> int:
        """Packs in a half of an outbox."""
        return self.first_sum + self.owned_chunks * CHUNK_PACKS

    @property
    def num_bytes(self) -> int:
        """Of an outbox."""
        return HALVES * self.half_packs * PACK_BYTES

    def kernel(self, num_packs: int) -> str:
        """The kernel, called as its file, for a message of so many packs."""
        return ONE_SHOT if num_packs * PACK_BYTES <= self.one_shot_bytes else CHUNKS

    @property
    def kernels(self) -> tuple[str, ...]:
        """All that messages of such a group need."""
        return tuple(dict.fromkeys(map(self.kernel, (1, self.max_packs))))

    def threads(self, kernel: str) -> int:
        """Of a block."""
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
        """The macros of a kernel, for the code of an element type."""
        made = {"ELEMENT": element, "WORLD_SIZE": self.world_size, "RANK": rank}
        if kernel == ONE_SHOT:
            return {**made, "SHARE": SHARE}
        return {**made, "TEAM": TEAM, "UNROLL": UNROLL}
