"""What stands where, and which form of the kernel serves a call: arithmetic alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.errors import ConfigError, UnsupportedError
from vllm_commext.gpu.launch import ELEMENT_CODES
from vllm_commext.reduce_rms import kernel
from vllm_commext.reduce_rms.kernel import Failure, FailureKind, Shape

MIB = 1 << 20


@given(st.integers(1, 1 << 20), st.integers(2, 8))
def test_a_slot_holds_what_it_was_sized_for(max_tokens: int, world: int) -> None:
    size = kernel.slot_bytes(max_tokens, world)
    assert size % (2 * MIB) == 0
    assert kernel.slot_capacity(size, world) >= max_tokens
    assert kernel.slot_capacity(size - 2 * MIB, world) < max_tokens


@pytest.mark.parametrize(("tokens", "world"), [(0, 2), (5, 0), (-1, 2)])
def test_a_slot_for_nothing_is_an_error(tokens: int, world: int) -> None:
    with pytest.raises(ConfigError, match="positive"):
        kernel.slot_bytes(tokens, world)


def test_a_record_of_a_failure() -> None:
    assert kernel.decode_failure(0) is None
    record = (2 << 56) | (5 << 32) | 123456
    assert kernel.decode_failure(record) == Failure(FailureKind.CONCURRENT_USE, 5, 123456)


shapes = st.builds(
    Shape,
    dtype=st.sampled_from(list(ELEMENT_CODES)),
    weight_dtype=st.sampled_from(list(ELEMENT_CODES)),
    world_size=st.integers(2, 8),
    q_size=st.integers(1, 4000).map(lambda n: 8 * n),
    k_size=st.integers(1, 1000).map(lambda n: 8 * n),
    aligned=st.booleans(),
)


@given(shapes, st.integers(1, 100_000), st.sampled_from([16, 78, 132, 148]))
def test_every_call_has_a_form_that_a_gpu_can_run(
    shape: Shape, tokens: int, multiprocessors: int
) -> None:
    kernel.check_shape(shape)
    tiling = kernel.choose(shape, tokens, multiprocessors)
    assert tiling in kernel.tilings(shape)
    assert 1 <= tiling.team_warps <= 32
    assert tiling.threads <= 1024
    assert tiling.block_teams <= 15  # each has a barrier of its own, beside the block's


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape("float64", "float32", 2, 8, 8), "float64"),
        (Shape("float32", "int8", 2, 8, 8), "int8"),
        (Shape("float32", "float32", 1, 8, 8), "2 to 8 ranks"),
        (Shape("float32", "float32", 9, 8, 8), "2 to 8 ranks"),
        (Shape("float32", "float32", 2, 12, 8), "multiples of 8"),
        (Shape("float32", "float32", 2, 8, 0), "multiples of 8"),
    ],
)
def test_a_shape_without_a_form_is_refused(shape: Shape, expected: str) -> None:
    with pytest.raises(UnsupportedError, match=expected):
        kernel.check_shape(shape)


def test_rows_of_an_odd_number_of_eights_are_packed_in_full() -> None:
    assert Shape("bfloat16", "bfloat16", 2, 8, 16).packs == 3
    assert Shape("float32", "bfloat16", 2, 8, 16).packs == 6
