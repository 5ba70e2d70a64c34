"""A state's parts, and what cannot be one; `test_plan.py` has that every byte of them arrives."""

import pytest

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import StatePart
from vllm_commext.nixl.geometry.mamba import (
    GATED_DELTA_NET,
    MAMBA1,
    MAMBA2,
    SHORT_CONV,
    StateTensor,
    derive_mamba_conv_split,
    state_parts,
)


@pytest.mark.parametrize(
    ("kind", "num_channels", "shape"),
    [
        (MAMBA2, 32, (4, 8, 16)),
        (MAMBA2, 31, (4, 8, 16)),
        (MAMBA2, 32 + 33, (4, 8, 16)),
        (MAMBA2, 32 + 2 * 15, (4, 8, 16)),
        (GATED_DELTA_NET, 64 + 2 * 12, (4, 16, 8)),
        (MAMBA1, 23, (24, 16)),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_values(
    kind: str, num_channels: int, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedError) as raised:
        derive_mamba_conv_split(kind, num_channels, shape)
    for told in (kind, str(num_channels), str(shape)):
        assert told in str(raised.value)


CONV, HEADS = StateTensor((64, 3), 2, "bfloat16"), StateTensor((4, 8, 16), 4, "float32")


@pytest.mark.parametrize("replicated", [False, True])
def test_parts_of_both_orders_by_hand(replicated: bool) -> None:
    size = 1 if replicated else 2
    common = {"num_groups": size, "replicated": replicated}
    first = state_parts(MAMBA2, [CONV, HEADS], dim_first=True, tp_size=2, **common)
    assert first == (
        StatePart("x", "bfloat16", 0, 4 * size, replicated, 48),
        StatePart("B", "bfloat16", 192, size, replicated, 96),
        StatePart("C", "bfloat16", 288, size, replicated, 96),
        StatePart("ssm", "float32", 384, 4 * size, replicated, 512),
    )
    last = StateTensor((3, 64), 2, "bfloat16")
    assert state_parts(MAMBA2, [last, HEADS], dim_first=False, tp_size=2, **common) == (
        StatePart("x", "bfloat16", 0, 4 * size, replicated, 16, 3, 128),
        StatePart("B", "bfloat16", 64, size, replicated, 32, 3, 128),
        StatePart("C", "bfloat16", 96, size, replicated, 32, 3, 128),
        first[-1],
    )


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        (MAMBA2, [CONV]),
        (MAMBA2, [CONV, HEADS, HEADS]),
        (MAMBA2, [HEADS, CONV]),
        (SHORT_CONV, [CONV, HEADS]),
    ],
)
def test_other_tensors_are_refused(kind: str, tensors: list[StateTensor]) -> None:
    with pytest.raises(UnsupportedError, match=f"'{kind}' with tensors .* is not known"):
        state_parts(kind, tensors, dim_first=True, tp_size=1)


@pytest.mark.parametrize(
    ("num_groups", "size", "held"), [(1, 1, 1), (1, 4, 1), (2, 4, 1), (8, 4, 2), (8, 1, 8)]
)
def test_groups_of_the_whole_model(num_groups: int, size: int, held: int) -> None:
    conv = StateTensor((32 + 2 * 16 * held, 3), 2, "bfloat16")
    parts = state_parts(MAMBA2, [conv, HEADS], dim_first=True, tp_size=size, num_groups=num_groups)
    assert [part.num_units for part in parts] == [4 * size, num_groups, num_groups, 4 * size]


@pytest.mark.parametrize(("num_groups", "size"), [(2, 1), (4, 2), (16, 4)])
def test_another_number_of_groups_than_the_model_has_is_refused(num_groups: int, size: int) -> None:
    expected = num_groups // size
    message = f"expected {expected} groups of B on each of {size} ranks.* has {num_groups}, got 1"
    with pytest.raises(UnsupportedError, match=message):
        state_parts(MAMBA2, [CONV, HEADS], dim_first=True, tp_size=size, num_groups=num_groups)


def test_without_the_models_word_each_rank_has_groups_of_its_own() -> None:
    """Another tensor-parallel size is refused then, for its number of units differs."""
    counts = [
        state_parts(MAMBA2, [CONV, HEADS], dim_first=True, tp_size=size)[1].num_units
        for size in (1, 2)
    ]
    assert counts == [1, 2]
