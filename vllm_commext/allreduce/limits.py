"""Names of the backends, in the table, in the settings and in the log; messages, and which of them
each takes: arithmetic on shape, dtype and world size, the same on every rank.

The bounds are those of the kernels behind the backends, and a little tighter where a kernel would
stop the process instead of saying no."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLASHINFER_ONE_SHOT = "flashinfer_one_shot"
CUSTOM = "custom"
NCCL = "nccl"
PUSH = "push"  # our own kernel
VLLM = "vllm"  # no backend of ours: vLLM's default dispatch, untouched

BACKENDS = (FLASHINFER_ONE_SHOT, CUSTOM, PUSH, NCCL)

# Who serves all-reduce, residual and norm together.
FUSED_PUSH = "fused_push"  # our own kernels, in one launch
FUSED_FLASHINFER = "fused_flashinfer"  # FlashInfer's kernel, which vLLM's own pass puts there
UNFUSED = "apart"  # the all-reduce, and then a kernel for the rest
FUSED = (FUSED_PUSH, FUSED_FLASHINFER, UNFUSED)

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PACK_BYTES = 16  # what one thread of every backend's kernel loads at once
FLASHINFER_WORLD_SIZES = (2, 4, 8, 16)
CUSTOM_WORLD_SIZES = (2, 4, 6, 8)
PUSH_WORLD_SIZES = range(2, 9)
MAX_BLOCK_THREADS = 512  # half of what a block may have: the launcher may double it
MAX_SLOT_BYTES = 1 << 29  # FlashInfer computes the offset of its third slot in 32 bits


@dataclass(frozen=True)
class Message:
    """Shape of a tensor to be summed, of any number of dimensions, and dtype, of `ITEM_BYTES`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def message_of(tensor: "torch.Tensor") -> Message:
    return Message(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def message_of_bytes(num_bytes: int, dtype: str, hidden: int) -> Message:
    """Make a two-dimensional message of that many bytes, with rows of `hidden` elements or fewer.

    Rows are halved until the size holds at least one, so that small messages keep two dimensions.
    """
    elements, rest = divmod(num_bytes, ITEM_BYTES[dtype])
    if rest or elements < 1:
        raise ValueError(f"expected whole elements of {dtype}, got {num_bytes} bytes")
    while elements % hidden:
        if hidden % 2:
            return Message((1, elements), dtype)
        hidden //= 2
    return Message((elements // hidden, hidden), dtype)


def flashinfer_block_threads(hidden: int, item_bytes: int) -> int:
    """Threads of a block, as FlashInfer's launcher shapes them.

    A row is one cluster of up to eight blocks; the launcher halves the cluster until it divides the
    row, and again while a block has fewer than 128 threads."""
    row_threads = hidden * item_bytes // PACK_BYTES
    cluster = 8
    while row_threads % cluster:
        cluster //= 2
    threads = row_threads // cluster
    while threads < 128 and cluster > 1:
        threads, cluster = threads * 2, cluster // 2
    return threads


def _flashinfer_shape(message: Message, world_size: int) -> bool:
    if world_size not in FLASHINFER_WORLD_SIZES or len(message.shape) != 2:
        return False
    rows, hidden = message.shape
    if rows < 1 or hidden < 1 or hidden * message.item_bytes % PACK_BYTES:
        return False
    return flashinfer_block_threads(hidden, message.item_bytes) <= MAX_BLOCK_THREADS


def flashinfer_one_shot(message: Message, world_size: int, max_bytes: int) -> bool:
    """Return whether the one-shot kernel takes it with a workspace for messages of `max_bytes`."""
    return _flashinfer_shape(message, world_size) and message.num_bytes <= max_bytes


@dataclass(frozen=True)
class WorkspaceSize:
    max_rows: int  # of a message; 0 where the budget holds not one
    max_bytes: int  # of the largest message
    device_bytes: int  # of each GPU's memory that it takes


def flashinfer_workspace(
    hidden: int, item_bytes: int, world_size: int, max_message_bytes: int, budget_bytes: int
) -> WorkspaceSize:
    """The largest workspace for messages up to `max_message_bytes` within `budget_bytes`.

    It has three slots of `world_size` messages, and a buffer as large as one (before FlashInfer
    0.7.2 half as large for float32)."""
    row_bytes = hidden * item_bytes
    row_device_bytes = world_size * 4 * row_bytes
    max_rows = min(
        max_message_bytes // row_bytes,
        budget_bytes // row_device_bytes,
        MAX_SLOT_BYTES // (world_size * row_bytes),
    )
    return WorkspaceSize(max_rows, max_rows * row_bytes, max_rows * row_device_bytes)


def custom(message: Message, world_size: int, max_bytes: int, fully_connected: bool) -> bool:
    """Return whether vLLM's custom all-reduce takes it; its bound is exclusive."""
    if world_size not in CUSTOM_WORLD_SIZES or not (world_size == 2 or fully_connected):
        return False
    return 0 < message.num_bytes < max_bytes and message.num_bytes % PACK_BYTES == 0


def push(message: Message, world_size: int) -> bool:
    """Return whether our own kernel takes it, of any size: of rows alike for any number of them."""
    if world_size not in PUSH_WORLD_SIZES or message.dtype not in ITEM_BYTES:
        return False
    row_bytes = message.shape[-1] * message.item_bytes if message.shape else 0
    return message.num_elements > 0 and row_bytes % PACK_BYTES == 0 and row_bytes > 0
