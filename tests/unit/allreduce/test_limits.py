"""What the backends can take, against what their kernels and buffers hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.limits import ITEM_BYTES, Message

bounded = settings(max_examples=60)
MIB = 1 << 20
DTYPES = st.sampled_from(sorted(ITEM_BYTES))
SHAPES = st.lists(st.integers(0, 5000), max_size=4).map(tuple)


def _row(hidden: int) -> Message:
    return Message((1, hidden), "bfloat16")


@bounded
@given(st.integers(1, 1 << 16), st.sampled_from([2, 4]))
def test_a_row_of_flashinfers_is_covered_by_its_blocks(packs: int, item_bytes: int) -> None:
    hidden = packs * 16 // item_bytes
    threads = limits.flashinfer_block_threads(hidden, item_bytes)
    assert packs % threads == 0
    assert packs // threads in (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("fits", "sizes"),
    [
        (True, [8, 16, 64, 128, 2880, 4096, 5120, 6144, 7168, 8192, 16384]),  # of models
        (False, [0, 1, 7, 12, 8 * 1031, 8 * 8192]),  # at which it stops
    ],
)
def test_hidden_sizes_that_flashinfer_takes(fits: bool, sizes: list[int]) -> None:
    for hidden in sizes:
        assert limits.flashinfer_one_shot(_row(hidden), 2, 64 * MIB) == fits, hidden


def test_flashinfer_wants_two_dimensions_and_certain_world_sizes() -> None:
    for shape in [(4096,), (1, 1, 4096), ()]:
        assert not limits.flashinfer_one_shot(Message(shape, "bfloat16"), 2, MIB)
    for world_size in (1, 3, 6, 32):
        assert not limits.flashinfer_one_shot(_row(4096), world_size, MIB)


@bounded
@given(
    hidden=st.integers(1, 4096).map(lambda packs: packs * 8),
    dtype=DTYPES,
    world_size=st.sampled_from(limits.FLASHINFER_WORLD_SIZES),
    largest=st.integers(0, 1 << 33),
    budget=st.integers(0, 1 << 34),
)
def test_a_workspace_keeps_to_its_bounds_and_holds_what_it_takes(
    hidden: int, dtype: str, world_size: int, largest: int, budget: int
) -> None:
    item = ITEM_BYTES[dtype]
    size = limits.flashinfer_workspace(hidden, item, world_size, largest, budget)
    assert size.device_bytes <= budget
    assert size.max_bytes <= largest
    slot_bytes = world_size * size.max_rows * hidden * item
    assert size.device_bytes == 4 * slot_bytes  # the buffer of FlashInfer 0.7.2 and later
    assert 3 * slot_bytes < 1 << 31
    for rows in {1, size.max_rows // 2, size.max_rows, size.max_rows + 1}:
        message = Message((rows, hidden), dtype)
        if limits.flashinfer_one_shot(message, world_size, size.max_bytes):
            assert world_size * message.num_bytes <= slot_bytes


@bounded
@given(SHAPES, DTYPES, st.integers(1, 16), st.integers(0, MIB), st.booleans())
def test_no_backend_takes_an_empty_message_or_one_above_its_bound(
    shape: tuple[int, ...], dtype: str, world_size: int, bound: int, connected: bool
) -> None:
    message = Message(shape, dtype)
    taken = [
        limits.flashinfer_one_shot(message, world_size, bound),
        limits.custom(message, world_size, bound, connected),
    ]
    if any(taken):
        assert 0 < message.num_bytes <= bound


@bounded
@given(SHAPES, DTYPES, st.integers(1, 16), st.integers(1, 100))
def test_ours_takes_rows_whatever_their_number(
    shape: tuple[int, ...], dtype: str, world_size: int, rows: int
) -> None:
    message, more = Message(shape, dtype), Message((rows, *shape), dtype)
    taken = limits.push(message, world_size)
    assert limits.push(more, world_size) == taken or not shape
    if taken:
        assert message.num_bytes > 0
        assert message.num_bytes % 16 == 0
        assert 2 <= world_size <= 8


def test_vllms_kernel_wants_packs_and_links() -> None:
    assert limits.custom(Message((8,), "bfloat16"), 2, 17, fully_connected=False)
    assert not limits.custom(Message((8,), "bfloat16"), 2, 16, fully_connected=True)
    assert not limits.custom(Message((9,), "bfloat16"), 2, MIB, fully_connected=True)
    assert not limits.custom(Message((8,), "bfloat16"), 4, MIB, fully_connected=False)
    assert not limits.custom(Message((8,), "bfloat16"), 3, MIB, fully_connected=True)
