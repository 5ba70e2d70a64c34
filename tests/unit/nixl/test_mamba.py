"""A state's parts against channels written out one by one, as vLLM's layers deal them out."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.nixl.case_strategies import states
from tests.unit.nixl.reference_cache import State, units_held
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
from vllm_commext.nixl.geometry.topology import Rank, interval

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@dataclass(frozen=True)
class OneRank:
    """A rank's tensors, and what every byte of its state is."""

    state: State
    size: int
    rank: int
    dim_first: bool

    def channels(self) -> list[tuple[str, int]]:
        """(projection, channel of the whole model) side by side."""
        return [
            (name, unit * channels + channel)
            for name, num_units, channels in self.state.projections
            for unit in units_held(num_units, self.size, self.rank, self.state.replicated)
            for channel in range(channels)
        ]

    def heads(self) -> list[int]:
        if self.state.kind == SHORT_CONV:
            return []
        return units_held(self.state.num_heads, self.size, self.rank, self.state.replicated)

    def labels(self) -> list[tuple[object, ...]]:
        """One a byte: convolution, then heads."""
        state, channels = self.state, self.channels()
        places = [(channel, step) for channel in channels for step in range(state.length)]
        if not self.dim_first:
            places = [(channel, step) for step in range(state.length) for channel in channels]
        found: list[tuple[object, ...]] = [
            (*channel, step, byte) for channel, step in places for byte in range(state.conv_item)
        ]
        size = state.recurrent_bytes
        return found + [("ssm", head, byte) for head in self.heads() for byte in range(size)]

    def tensors(self) -> list[StateTensor]:
        state = self.state
        shape = (len(self.channels()), state.length)
        conv = StateTensor(shape if self.dim_first else shape[::-1], state.conv_item, "a")
        inner = (state.state_size,)
        if state.kind in (MAMBA2, GATED_DELTA_NET):
            inner = (state.head_dim, state.state_size)
        heads = len(self.heads())
        return [conv, StateTensor((heads, *inner), state.ssm_item, "b")] if heads else [conv]

    def parts(self) -> tuple[StatePart, ...]:
        return state_parts(
            self.state.kind,
            self.tensors(),
            dim_first=self.dim_first,
            tp_size=self.size,
            num_groups=self.state.num_groups,
            replicated=self.state.replicated,
        )


def by_parts(one: OneRank) -> list[tuple[object, ...]]:
    """The labels as the parts tell them, in the order of addresses."""
    found: dict[int, tuple[object, ...]] = {}
    for part in one.parts():
        first, end = interval(part.split, Rank(one.size, one.rank))
        for unit in range(first, end):
            for run in range(part.num_runs):
                start = part.offset + run * part.run_stride + (unit - first) * part.unit_bytes
                for byte in range(part.unit_bytes):
                    assert start + byte not in found
                    found[start + byte] = label(one, part, unit, run, byte)
    assert sorted(found) == list(range(len(found)))
    return [found[address] for address in sorted(found)]


def label(one: OneRank, part: StatePart, unit: int, run: int, byte: int) -> tuple[object, ...]:
    if part.name == "ssm":
        return "ssm", unit, byte
    item = one.state.conv_item
    steps = one.state.length if one.dim_first else 1
    channel, rest = divmod(byte, steps * item)
    step, inner = divmod(rest, item)
    per_unit = part.unit_bytes // (steps * item)
    return part.name, unit * per_unit + channel, step if one.dim_first else run, inner


@given(st.data(), SIZES, st.booleans())
@settings(max_examples=80)
def test_parts_name_every_byte_of_a_state_on_every_rank(
    data: st.DataObject, size: int, dim_first: bool
) -> None:
    state = data.draw(states((size, size)))
    for rank in range(size):
        one = OneRank(state, size, rank, dim_first)
        assert by_parts(one) == one.labels()
        kinds = {part.dtype for part in one.parts() if part.name == "ssm"}
        assert kinds <= {"b"}
        assert {part.replicated for part in one.parts()} == {state.replicated}


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
