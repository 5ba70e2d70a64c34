"""What is prefetched of the next weights: within them, in whole lines, no more than wanted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.allreduce.fused import layout
from vllm_commext.allreduce.fused.layout import NOTHING, PIECE_ALIGNMENT, of_weight, pieces

MIB = 1 << 20


@given(
    *(st.integers(1, 1 << 17), st.integers(1, 1 << 16), st.integers(0, 1 << 10)),
    *(st.integers(1, 200), st.integers(0, 64 * MIB)),
)
def test_pieces_are_whole_lines_within_the_rows(
    rows: int, row_bytes: int, gap: int, multiprocessors: int, total: int
) -> None:
    stride = row_bytes + gap
    found = pieces(rows, row_bytes, stride, multiprocessors, total)
    assert found.count * found.num_bytes <= total
    if found == NOTHING:
        return
    assert found.count <= rows
    assert found.num_bytes <= row_bytes
    assert found.stride == stride
    assert found.num_bytes % PIECE_ALIGNMENT == found.stride % PIECE_ALIGNMENT == 0
    assert found.num_bytes > 0


@pytest.mark.parametrize(
    ("rows", "row_bytes", "count", "num_bytes"),
    [(5120, 16384, 5120, 1536), (28672, 16384, 16896, 384), (132, 1024, 132, 1024)],
)
def test_every_row_that_a_product_begins_with_has_a_piece(
    rows: int, row_bytes: int, count: int, num_bytes: int
) -> None:
    """Llama 70B's products of two ranks, and a matrix that is wanted whole."""
    found = pieces(rows, row_bytes, row_bytes, 132, 8 * MIB)
    assert (found.count, found.num_bytes) == (count, num_bytes)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 64), (64, 64), (100, 32), (117, 0), (500, 0)])
def test_blocks_that_prefetch_find_a_multiprocessor(rows: int, blocks: int) -> None:
    assert layout.spare_blocks(rows, 132) == blocks


class TestWeights:
    def pieces_of(self, weight: torch.Tensor | None) -> tuple[int, layout.Pieces]:
        return of_weight(weight, 132, 8 * MIB)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_rows_or_columns_that_lie_side_by_side(self, dtype: torch.dtype) -> None:
        weight = torch.empty(4096, 2048, dtype=dtype)
        address, found = self.pieces_of(weight)
        assert address == weight.data_ptr()
        assert found.stride == 2048 * dtype.itemsize
        assert found.count == 4096
        assert self.pieces_of(weight.t()) == (address, found)

    def test_the_last_piece_ends_within_what_is_the_weights(self) -> None:
        wide = torch.empty(4096, 4096, dtype=torch.bfloat16)
        part = wide[:, :1024]
        address, found = self.pieces_of(part)
        assert (address, found.stride) == (part.data_ptr(), 8192)
        assert found.num_bytes <= 2048
        end = address + (found.count - 1) * found.stride + found.num_bytes
        assert end <= wide.data_ptr() + wide.nbytes

    def test_nothing_of_any_other(self) -> None:
        small = torch.empty(64, 64)
        several = torch.empty(4, 1024, 1024)
        spread = torch.empty(2048, 2048, 2)[:, :, 0]
        askew = torch.empty(2048 * 2048 + 1)[1:].view(2048, 2048)
        one = torch.empty(1, dtype=torch.bfloat16).expand(4096, 4096)
        for weight in (None, small, several, spread, askew, one):
            assert self.pieces_of(weight)[1] == NOTHING
