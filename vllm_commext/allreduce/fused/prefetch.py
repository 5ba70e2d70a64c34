"""Which bytes of the next product's weights are prefetched while few rows travel; arithmetic.

A product of few rows takes as long as its weights take to come from memory, and memory has nothing
to do while ranks wait for one another's rows. Every multiprocessor begins such a product with the
first columns of its own rows of the weights, so these are what is asked for.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.allreduce.message import PACK_BYTES

if TYPE_CHECKING:
    import torch

# In a chain of matrix products on two H100s, of 0 to 16 MiB and 0 to 2400 cycles, these cost least
# over 1, 16 and 64 rows (benchmarks/fused_layer.py).
TOTAL_BYTES = 16 << 20
MOST_BLOCKS, LEAST_BLOCKS = 64, 16  # of a launch, beside those that take rows
TILE_ROWS = 128  # of weights, that a multiprocessor begins with
PIECE_ALIGNMENT = 128  # bytes: a line of the cache
AFTER_CYCLES = 1200  # of a launch: its own first loads come before
LEAST_WEIGHT_BYTES = 4 << 20


@dataclass(frozen=True)
class Pieces:
    """Of a matrix in memory, row by row.

    Attributes:
        count: of pieces, one a row.
        num_bytes: of a piece, a multiple of `PIECE_ALIGNMENT`.
        stride: bytes from one's beginning to the next's.
    """

    count: int
    num_bytes: int
    stride: int


NOTHING = Pieces(0, 0, 0)


def pieces(rows: int, row_bytes: int, stride: int, multiprocessors: int, total: int) -> Pieces:
    """What to prefetch of a matrix: the beginning of those rows that are begun with.

    Args:
        rows: of the matrix, one a column of the product.
        row_bytes: of a row.
        stride: bytes from one row's beginning to the next's.
        total: bytes at most.
    """
    covered = min(rows, multiprocessors * TILE_ROWS, total // PIECE_ALIGNMENT)
    if covered < 1 or stride % PIECE_ALIGNMENT:
        return NOTHING
    each = min(total // covered, row_bytes) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
    return Pieces(covered, each, stride) if each else NOTHING


def spare_blocks(row_blocks: int, multiprocessors: int) -> int:
    """Blocks that prefetch beside so many that take rows: those that find a multiprocessor."""
    spare = min(MOST_BLOCKS, multiprocessors - row_blocks)
    return spare if spare >= LEAST_BLOCKS else 0


def of_weight(
    weight: "torch.Tensor | None", multiprocessors: int, total: int
) -> tuple[int, Pieces]:
    """The address of what a product takes beside our output, and the pieces of it, `total` bytes at
    most: of a matrix that lies row by row, or transposed column by column. Nothing of any other
    tensor."""
    if weight is None or weight.dim() != 2 or weight.numel() * weight.itemsize < LEAST_WEIGHT_BYTES:
        return 0, NOTHING
    rows, columns = weight.shape
    if weight.stride(1) != 1:
        rows, columns = columns, rows
    outer, inner = max(weight.stride()), min(weight.stride())
    if inner != 1 or outer < columns or weight.data_ptr() % PACK_BYTES:
        return 0, NOTHING
    sizes = columns * weight.itemsize, outer * weight.itemsize
    return weight.data_ptr(), pieces(rows, *sizes, multiprocessors, total)
