"""The kernel's forms: how one is chosen for a call, compiled and loaded; and the workspace that it
reads.

With N ranks, the shared allocation of a rank is three slots of `comm_size` bytes. In a slot, token
t has N words of 8 bytes, one from each rank, at word t * N + source rank: the sum of squares of its
local Q as float32 in the low half, that of its local K in the high half. An empty word is twice
-0.0.

The workspace's own words, an int64 tensor on the device:

    0 .. N-1   address of each rank's shared allocation, as this process has it mapped
    N          address of the state words, a uint32 a token: 2 * slot, + 1 while a call runs
    N + 1      address of the failure record in device memory, a uint64
    N + 2      address of the failure record in host memory, a uint64
    N + 3      bytes of a slot
    N + 4      this rank
"""

import ctypes
import threading
from dataclasses import dataclass
from enum import IntEnum

from vllm_commext.errors import ConfigError, UnsupportedError
from vllm_commext.gpu import launch
from vllm_commext.gpu.ipc import round_up
from vllm_commext.gpu.launch import ELEMENT_CODES, WARP, Device, Program, arguments_type

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
PACK_BYTES = 16
MAX_TEAM_WARPS = 32
SIZE_MULTIPLE = 8
BALANCED_PACKS = 1800  # a multiprocessor; beyond them more rows must be in flight, seen on H200s
PROGRAM = Program("reduce_rms")
NUM_SLOTS = 3
WORD_BYTES = 8
SENTINEL_BITS = 0x80000000  # -0.0 as float32
WORLD_SIZES = range(2, 9)
EXTRA_WORDS = 5


@dataclass(frozen=True)
class Shape:
    """Shape and types that the kernel is compiled for; types are keys of `ELEMENT_CODES`."""

    dtype: str  # of the rows
    weight_dtype: str
    world_size: int  # 2 to 8
    q_size: int  # local elements of the first part, a multiple of 8
    k_size: int  # the same of the second part
    aligned: bool = True  # rows and weights begin at multiples of 16 bytes

    @property
    def packs(self) -> int:
        return (self.q_size + self.k_size) * ELEMENT_BYTES[self.dtype] // PACK_BYTES


@dataclass(frozen=True)
class Tiling:
    team_warps: int  # that share a token
    block_teams: int = 1  # tokens a block
    weights_early: bool = False  # loaded while the sums travel
    streaming: bool = False  # rows are the first to leave the caches once they are read

    @property
    def threads(self) -> int:
        return self.team_warps * self.block_teams * WARP


def check_shape(shape: Shape) -> None:
    """Raise `UnsupportedError` where the kernel has no form for the shape."""
    for dtype in (shape.dtype, shape.weight_dtype):
        if dtype not in ELEMENT_CODES:
            raise UnsupportedError(f"expected one of {', '.join(ELEMENT_CODES)}, got {dtype}")
    if shape.world_size not in WORLD_SIZES:
        raise UnsupportedError(f"expected 2 to 8 ranks, got {shape.world_size}")
    for size in (shape.q_size, shape.k_size):
        if size % SIZE_MULTIPLE or size <= 0:
            raise UnsupportedError(f"expected local sizes that are multiples of 8, got {size}")


def _warps_for(packs: int, packs_per_thread: int) -> int:
    """Warps a token so that no thread has more packs, as far as a block may have them."""
    return min(MAX_TEAM_WARPS, -(-packs // (WARP * packs_per_thread)))


def low_latency(packs: int) -> Tiling:
    """The tiling for few tokens: as many warps as the row has 512-byte pieces, up to sixteen."""
    return Tiling(min(16, _warps_for(packs, 1)), weights_early=True)


def balanced(packs: int) -> Tiling:
    """The tiling for some hundred tokens: four packs a thread, a token a block."""
    return Tiling(_warps_for(packs, 4), weights_early=True)


def high_throughput(packs: int) -> Tiling:
    """The tiling for thousands of tokens: as many rows in flight as registers allow."""
    team_warps = _warps_for(packs, 7)
    return Tiling(team_warps, block_teams=max(1, min(4, 8 // team_warps)), streaming=True)


def choose(
    shape: Shape, num_tokens: int, multiprocessors: int, batch_invariant: bool = False
) -> Tiling:
    """Choose the tiling for `num_tokens` tokens on a GPU with that many multiprocessors.

    A row's squares are added in an order that the tiling gives, so one for all is batch-invariant.
    """
    if batch_invariant:
        return balanced(shape.packs)
    if num_tokens <= 2 * multiprocessors:
        return low_latency(shape.packs)
    if num_tokens * shape.packs <= BALANCED_PACKS * multiprocessors:
        return balanced(shape.packs)
    return high_throughput(shape.packs)


def tilings(shape: Shape) -> tuple[Tiling, ...]:
    forms = (low_latency(shape.packs), balanced(shape.packs), high_throughput(shape.packs))
    return tuple(dict.fromkeys(forms))


def macros(shape: Shape, tiling: Tiling) -> dict[str, int]:
    return {
        "ELEMENT": ELEMENT_CODES[shape.dtype],
        "WEIGHT": ELEMENT_CODES[shape.weight_dtype],
        "WORLD_SIZE": shape.world_size,
        "Q_SIZE": shape.q_size,
        "K_SIZE": shape.k_size,
        "ALIGNED": int(shape.aligned),
        "TEAM_WARPS": tiling.team_warps,
        "BLOCK_TEAMS": tiling.block_teams,
        "WEIGHTS_EARLY": int(tiling.weights_early),
        "STREAMING": int(tiling.streaming),
    }


def make_arguments(**fields: float) -> ctypes.Structure:
    return arguments_type(PROGRAM.main.name)(**fields)


@dataclass(frozen=True)
class Kernel:
    function: launch.Function
    block_teams: int

    def launch(self, arguments: ctypes.Structure, stream: int) -> None:
        """Launch for ``arguments.num_tokens`` tokens; UnsupportedError where the driver refuses."""
        self.function.launch(arguments, -(-arguments.num_tokens // self.block_teams), stream)


class Kernels:
    def __init__(self) -> None:
        self._loaded: dict[tuple[int, Shape], dict[Tiling, Kernel]] = {}
        self._lock = threading.Lock()

    def get(
        self, shape: Shape, num_tokens: int, device: Device, batch_invariant: bool = False
    ) -> Kernel:
        form = choose(shape, num_tokens, device.multiprocessors, batch_invariant)
        return self._loaded[device.ordinal, shape][form]

    def load(self, shape: Shape, device: Device) -> None:
        """Load all forms of a shape: a later call may come in a capture, when none can be."""
        with self._lock:
            key = (device.ordinal, shape)
            if key not in self._loaded:
                check_shape(shape)
                self._loaded[key] = {
                    form: Kernel(
                        launch.load(
                            *(PROGRAM, macros(shape, form), form.threads, device), programmatic=True
                        ),
                        form.block_teams,
                    )
                    for form in tilings(shape)
                }


def slot_bytes(max_tokens: int, world_size: int) -> int:
    """Size of one slot for `max_tokens` tokens, rounded up to 2 MiB; ConfigError where a count is
    not positive."""
    if max_tokens < 1 or world_size < 1:
        raise ConfigError(
            f"expected positive max_tokens and world_size, got {max_tokens} and {world_size}"
        )
    return round_up(max_tokens * world_size * WORD_BYTES)


def slot_capacity(comm_size: int, world_size: int) -> int:
    return comm_size // (world_size * WORD_BYTES)


def num_words(world_size: int) -> int:
    return world_size + EXTRA_WORDS


class FailureKind(IntEnum):
    """MISSING_PEER: its sums did not come in time. CONCURRENT_USE: two calls at the same time."""

    MISSING_PEER = 1
    CONCURRENT_USE = 2


@dataclass(frozen=True)
class Failure:
    kind: FailureKind
    rank: int  # that was waited for, or this one where two calls met
    token: int  # row of the call, counted within its piece


def decode_failure(record: int) -> Failure | None:
    """Decode a record of 64 bits: kind, rank and token from high to low; None for 0."""
    if record == 0:
        return None
    rank, token = (record >> 32) & 0xFFFFFF, record & 0xFFFFFFFF
    return Failure(FailureKind(record >> 56), rank, token)
