"""Layout of a workspace for `world_size` = N ranks. Pure arithmetic.

The shared allocation of a rank is three slots of `comm_size` bytes. In a slot, token t has N words
of 8 bytes, one from each rank, at word t * N + source rank: the sum of squares of its local Q as
float32 in the low half, that of its local K in the high half. An empty word is twice -0.0.

The workspace's own words, an int64 tensor on the device:

    0 .. N-1   address of each rank's shared allocation, as this process has it mapped
    N          address of the state words, a uint32 a token: 2 * slot, + 1 while a call runs
    N + 1      address of the failure record in device memory, a uint64
    N + 2      address of the failure record in host memory, a uint64
    N + 3      bytes of a slot
    N + 4      this rank
"""

from dataclasses import dataclass
from enum import IntEnum

from vllm_commext.errors import ConfigError
from vllm_commext.gpu.ipc import round_up

NUM_SLOTS = 3
WORD_BYTES = 8
STATE_BYTES = 4
SENTINEL_BITS = 0x80000000  # -0.0 as float32
WORLD_SIZES = range(2, 9)
EXTRA_WORDS = 5


def compute_comm_size_for_minimax(max_tokens: int, world_size: int, fused_qk: bool = True) -> int:
    """Bytes of one slot that holds `max_tokens` tokens, rounded up to 2 MiB.

    A word carries both sums, so the size is the same for one tensor and for Q and K fused.

    Raises:
        ConfigError: a count is not positive.
    """
    del fused_qk
    if max_tokens < 1 or world_size < 1:
        raise ConfigError(
            f"expected positive max_tokens and world_size, got {max_tokens} and {world_size}"
        )
    return round_up(max_tokens * world_size * WORD_BYTES)


def slot_capacity(comm_size: int, world_size: int) -> int:
    """Tokens that a slot of `comm_size` bytes holds, that is, tokens of one launch."""
    return comm_size // (world_size * WORD_BYTES)


def num_words(world_size: int) -> int:
    return world_size + EXTRA_WORDS


class FailureKind(IntEnum):
    """MISSING_PEER: its sums did not come in time. CONCURRENT_USE: two calls at the same time."""

    MISSING_PEER = 1
    CONCURRENT_USE = 2


@dataclass(frozen=True)
class Failure:
    """The first failure of a workspace.

    Attributes:
        kind: what happened.
        rank: the rank that was waited for, or this rank where two calls met.
        token: row of the call in which it happened, counted within its piece.
    """

    kind: FailureKind
    rank: int
    token: int


def decode_failure(record: int) -> Failure | None:
    """Decode a record of 64 bits: kind, rank and token from high to low; None for 0."""
    if record == 0:
        return None
    rank, token = (record >> 32) & 0xFFFFFF, record & 0xFFFFFFFF
    return Failure(FailureKind(record >> 56), rank, token)
