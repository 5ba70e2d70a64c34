"""All-reduce, residual and RMSNorm in one kernel: its forms, what each takes, and what it
prefetches; arithmetic.

A product of few rows takes as long as its weights take to come from memory, and memory has nothing
to do while ranks wait for one another's rows. Every multiprocessor begins such a product with the
first columns of its own rows of the weights, so these are what is prefetched."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.allreduce.limits import ITEM_BYTES, PACK_BYTES
from vllm_commext.gpu.launch import ELEMENT_CODES, WARP

if TYPE_CHECKING:
    import torch

ONE_PHASE, TWO_PHASE = "fused_one_phase", "fused_two_phase"
NORM, STATIC_FP8, ROW_FP8, GROUP_FP8 = range(4)  # as the kernels' EPILOGUE has them
EPILOGUES = {  # their names, with the alignment of columns of scales
    "norm": (NORM, 0),
    "fp8_static": (STATIC_FP8, 0),
    "fp8_row": (ROW_FP8, 0),
    "fp8_group": (GROUP_FP8, 0),
    "fp8_group_columns": (GROUP_FP8, 1),
    "fp8_group_columns_4": (GROUP_FP8, 4),
}
GROUP = 128  # elements that share a scale under `GROUP_FP8`
MOST_WARPS = 32  # of a block
ONE_PHASE_BYTES = 256 << 10  # of more ranks than two; there an all-reduce's two kinds are equal
WORLD_SIZES = range(2, 9)
# In a chain of matrix products on two H100s, of 0 to 16 MiB and 0 to 2400 cycles, these cost least
# over 1, 16 and 64 rows (benchmarks/results/fused_engine.md).
TOTAL_BYTES = 16 << 20
MOST_BLOCKS, LEAST_BLOCKS = 64, 16  # of a launch, beside those that take rows
TILE_ROWS = 128  # of weights, that a multiprocessor begins with
PIECE_ALIGNMENT = 128  # bytes: a line of the cache
AFTER_CYCLES = 1200  # of a launch: its own first loads come before
LEAST_WEIGHT_BYTES = 4 << 20


@dataclass(frozen=True)
class FusedShape:
    """Shape and types that a kernel is compiled for, beside the ranks and its form.

    Attributes:
        dtype: of input, residual and output, a key of `ELEMENT_CODES`.
        hidden: elements of a row.
        weight_bias: added to each weight: 1 for Gemma's norm, else 0.
        scale_alignment: of `GROUP_FP8`: 0 where a row's scales lie side by side; else a group's
            scales of all rows do, and as many of them fit between two groups as are a multiple of
            this: 1, or 4 for what loads 16 bytes at a time.
    """

    dtype: str
    weight_dtype: str
    hidden: int
    residual: bool = True
    weight_bias: int = 0
    epilogue: int = NORM
    scale_alignment: int = 0

    @property
    def row_packs(self) -> int:
        return self.hidden * ITEM_BYTES[self.dtype] // PACK_BYTES

    def problem(self) -> str:
        """Say why no kernel can be compiled for it; empty where one can."""
        if self.dtype not in ELEMENT_CODES or self.weight_dtype not in ELEMENT_CODES:
            return f"expected one of {', '.join(ELEMENT_CODES)}, got {self.dtype}"
        if self.hidden < 1 or self.hidden % 8:
            return f"expected rows of a multiple of 8 elements, got {self.hidden}"
        if self.epilogue == GROUP_FP8 and self.hidden % GROUP:
            return f"expected rows of whole groups of {GROUP} elements, got {self.hidden}"
        if self.row_packs > MOST_WARPS * WARP * 8:
            return f"expected rows of 128 KiB at most, got {self.row_packs * PACK_BYTES} bytes"
        return ""


@dataclass(frozen=True)
class Form:
    """A kernel and its block, which takes a row at a time."""

    kernel: str  # `ONE_PHASE` or `TWO_PHASE`: its name and that of its file
    warps: int  # of a block

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Blocks with registers for 1024 threads, the most at which no form spills."""
        return max(1, MOST_WARPS // self.warps)

    def macros(self, shape: FusedShape, world_size: int, rank: int) -> dict[str, int]:
        return {
            "ELEMENT": ELEMENT_CODES[shape.dtype],
            "WEIGHT": ELEMENT_CODES[shape.weight_dtype],
            "WORLD_SIZE": world_size,
            "RANK": rank,
            "HIDDEN": shape.hidden,
            "TEAM_WARPS": self.warps,
            "MIN_BLOCKS": self.blocks_per_multiprocessor,
            "RESIDUAL": int(shape.residual),
            "WEIGHT_BIAS": shape.weight_bias,
            "EPILOGUE": shape.epilogue,
        }

    def num_blocks(self, num_rows: int, world_size: int, multiprocessors: int) -> int:
        """Blocks of a launch: one a row, or a turn of the ranks, but no more than are resident."""
        work = num_rows if self.kernel == ONE_PHASE else -(-num_rows // world_size)
        return min(work, multiprocessors * self.blocks_per_multiprocessor)

    def most_rows(self, shape: FusedShape, half_packs: int, world_size: int) -> int:
        """Rows that fit a half of staging memory of `half_packs`.

        One phase keeps every peer's rows. Two phases keep of every peer its part of the rows that
        this rank sums, and then what the peer made of those that it sums."""
        if self.kernel == ONE_PHASE:
            return half_packs // ((world_size - 1) * shape.row_packs)
        return half_packs // (2 * (world_size - 1) * shape.row_packs) * world_size


def warps(shape: FusedShape) -> int:
    """Warps of a block whose threads hold one pack each, as far as a block can have them."""
    return min(MOST_WARPS, -(-shape.row_packs // WARP))


def choose(shape: FusedShape, num_rows: int, world_size: int) -> Form:
    """Choose the form for a number of rows.

    One phase sends a whole message to every peer, two phases twice a share of it, one after the
    other: of two ranks that is the same number of bytes. A thread has one pack of a row where a
    block can have as many threads: on two H200s that was fastest at every size from 16 KiB to 128
    MiB, by 1.00x (128 MiB) to 1.30x over two packs."""
    small = num_rows * shape.row_packs * PACK_BYTES <= ONE_PHASE_BYTES
    kernel = ONE_PHASE if world_size == 2 or small else TWO_PHASE
    return Form(kernel, warps(shape))


def forms(shape: FusedShape, world_size: int) -> tuple[Form, ...]:
    kernels = (ONE_PHASE,) if world_size == 2 else (ONE_PHASE, TWO_PHASE)
    return tuple(Form(kernel, warps(shape)) for kernel in kernels)


@dataclass(frozen=True)
class Pieces:
    """Pieces of a matrix in memory, one a row."""

    count: int
    num_bytes: int  # of a piece, a multiple of `PIECE_ALIGNMENT`
    stride: int  # bytes from one's beginning to the next's


NOTHING = Pieces(0, 0, 0)


def pieces(rows: int, row_bytes: int, stride: int, multiprocessors: int, total: int) -> Pieces:
    """Pieces of a matrix to prefetch, `total` bytes at most: the beginning of those rows that are
    begun with. A row of the matrix is a column of the product."""
    covered = min(rows, multiprocessors * TILE_ROWS, total // PIECE_ALIGNMENT)
    if covered < 1 or stride % PIECE_ALIGNMENT:
        return NOTHING
    each = min(total // covered, row_bytes) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
    return Pieces(covered, each, stride) if each else NOTHING


def spare_blocks(row_blocks: int, multiprocessors: int) -> int:
    """Blocks that prefetch beside those that take rows: as many as find a multiprocessor."""
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
