"""The kernel's own source, run on a CPU: slots, states, sentinels, arithmetic, failures."""

import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from tests.kit.host_kernels import COMPILER
from tests.unit.reduce_rms.emulation import Call, Ranks, exact, run
from vllm_commext.reduce_rms.kernel import FailureKind, Shape, Tiling

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="uses x86's conversions of half"),
]
TILINGS = {
    "a warp a token": Tiling(1, block_teams=4),
    "two warps a token": Tiling(2, block_teams=2, weights_early=True),
    "a block a token": Tiling(3, weights_early=True),
    "streaming": Tiling(1, block_teams=2, streaming=True),
}
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_calls(
    shape: Shape, ranks: Ranks, token_counts: list[int], seed: int, scale: float = 1.0
) -> list[list[Call]]:
    random = torch.Generator().manual_seed(seed)
    dtype, weight_dtype = DTYPES[shape.dtype], DTYPES[shape.weight_dtype]
    columns = shape.q_size + 2 * shape.k_size + 8

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    return [
        [
            Call(
                (normal(tokens, columns) * scale).to(dtype),
                normal(shape.q_size).to(weight_dtype),
                normal(shape.k_size).to(weight_dtype),
                ranks,
                rank,
            )
            for tokens in token_counts
        ]
        for rank in ranks.ranks
    ]


def errors(shape: Shape, calls: list[Call]) -> tuple[float, float]:
    """Largest error of Q and of K over the ranks, in units of the last place of the output."""
    q, k = (
        [call.rows[:, : shape.q_size] for call in calls],
        [call.rows[:, shape.q_size : shape.q_size + shape.k_size] for call in calls],
    )
    return (
        error([call.q for call in calls], exact(q, [call.q_weight for call in calls])),
        error([call.k for call in calls], exact(k, [call.k_weight for call in calls])),
    )


def error(outs: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    out, want = torch.cat(outs), torch.cat(wanted)
    place = ULP[out.dtype] * want.abs().clamp_min(torch.finfo(out.dtype).tiny)
    return float(((out.double() - want).abs() / place).max()) if out.numel() else 0.0


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "tiling"),
    [
        ("bfloat16", "bfloat16", "a warp a token"),
        ("bfloat16", "bfloat16", "two warps a token"),
        ("bfloat16", "float32", "a block a token"),
        ("float16", "float16", "a block a token"),
        ("float32", "float32", "two warps a token"),
        ("float32", "bfloat16", "a warp a token"),
        ("bfloat16", "bfloat16", "streaming"),
    ],
)
def test_every_type_and_tiling_is_exact(dtype: str, weight_dtype: str, tiling: str) -> None:
    shape = Shape(dtype, weight_dtype, 2, 328, 72)
    ranks = Ranks(2, 16)
    streams = make_calls(shape, ranks, [7, 1, 16], seed=1)
    run(shape, TILINGS[tiling], streams)
    for calls in zip(*streams, strict=True):
        assert max(errors(shape, list(calls))) <= 1.0
    assert all(ranks.failure(rank) is None for rank in ranks.ranks)


@examples(5)
@given(
    st.sampled_from([(2, "a warp a token"), (3, "two warps a token"), (8, "a block a token")]),
    st.lists(st.integers(1, 24), min_size=1, max_size=12),
    st.integers(0, 1 << 16),
)
def test_any_sequence_of_calls(group: tuple[int, str], token_counts: list[int], seed: int) -> None:
    world_size, tiling = group[0], TILINGS[group[1]]
    shape = Shape("bfloat16", "bfloat16", world_size, 64, 16)
    ranks = Ranks(world_size, 24)
    streams = make_calls(shape, ranks, token_counts, seed)
    run(shape, tiling, streams, workers=1 + seed % 3, seed=seed)
    for calls in zip(*streams, strict=True):
        assert max(errors(shape, list(calls))) <= 1.0
    used = [sum(count > token for count in token_counts) for token in range(24)]
    for rank in ranks.ranks:
        assert ranks.failure(rank) is None
        assert [int(state) for state in ranks.states[rank]] == [2 * (n % 3) for n in used]
        # What the last call of each token received is still there; all before is empty again.
        others = world_size - 1
        assert ranks.slot_words_in_use(rank).sum() == others * sum(n > 0 for n in used)


SPECIAL = {
    "plus zero": 0.0,
    "minus zero": -0.0,
    "subnormal": 1e-40,
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "nan": float("nan"),
}


@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("whole_row", [True, False], ids=["whole row", "one element"])
def test_special_values_on_one_rank(value: float, whole_row: bool) -> None:
    shape = Shape("bfloat16", "bfloat16", 2, 64, 16)
    ranks = Ranks(2, 8)
    streams = make_calls(shape, ranks, [3, 3, 3, 3], seed=2)
    for call in streams[1]:
        if whole_row:
            call.rows[1] = value
        else:
            call.rows[1, 5] = call.rows[1, 70] = value
    run(shape, Tiling(1, block_teams=4), streams)
    for calls in zip(*streams, strict=True):
        wanted = exact([c.rows[:, :64] for c in calls], [c.q_weight for c in calls])
        for call, want in zip(calls, wanted, strict=True):
            assert torch.equal(call.q.isnan(), want.isnan())
            assert torch.equal(call.q.isinf(), want.isinf())
            finite = want.isfinite()
            close = torch.isclose(call.q.double(), want, rtol=2**-8, atol=1e-38)
            assert bool(close[finite].all())
    assert ranks.failure(0) is None


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_rows_of_zeros_everywhere_are_no_missing_sums(value: float) -> None:
    shape = Shape("bfloat16", "bfloat16", 2, 64, 16)
    ranks = Ranks(2, 4, timeout_seconds=5)
    streams = make_calls(shape, ranks, [4] * 7, seed=3)
    for call in (*streams[0], *streams[1]):
        call.rows.fill_(value)
    run(shape, Tiling(1, block_teams=4), streams)
    assert all(float(c.q.abs().max()) == 0.0 for c in (*streams[0], *streams[1]))
    assert ranks.failure(0) is None


def test_the_bits_do_not_depend_on_the_interleaving_or_the_rank() -> None:
    """A column of ones with weight one shows the factor itself."""
    shape = Shape("float32", "float32", 3, 328, 72)
    outs = []
    for seed in range(6):
        ranks = Ranks(3, 8)
        streams = make_calls(shape, ranks, [8, 5, 8], seed=4)
        for call in sum(streams, []):
            call.rows[:, 0] = call.q_weight[0] = 1.0
        run(shape, Tiling(2, block_teams=2), streams, workers=1 + seed % 3, seed=seed)
        outs.append(torch.cat([call.q.flatten() for calls in streams for call in calls]))
        for calls in zip(*streams, strict=True):
            assert all(torch.equal(call.q[:, 0], calls[0].q[:, 0]) for call in calls)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_two_calls_at_the_same_time_are_found_out() -> None:
    shape = Shape("bfloat16", "bfloat16", 2, 64, 16)
    ranks = Ranks(2, 8, timeout_seconds=2.0)
    mine, _ = make_calls(shape, ranks, [8, 8, 8], seed=8)
    # Two streams of rank 0, whose calls wait for a rank 1 that has not begun.
    run(shape, Tiling(1, block_teams=4), [mine, mine])
    failure = ranks.failure(0)
    assert (failure.kind, failure.rank) == (FailureKind.CONCURRENT_USE, 0)
