"""A plan reads the longest runs of bytes that both sides have in common, whatever their layouts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from tests.unit.nixl.case_strategies import HEADS, ORDERS, fits
from tests.unit.nixl.cluster_cases import PAIRS
from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group, Table
from tests.unit.nixl.reference_layout import describe
from tests.unit.nixl.reference_meaning import held
from vllm_commext.nixl.geometry.plan import Blocks, plan_read

TOKENS = 4


@st.composite
def engine_pairs(draw: st.DrawFn) -> tuple[Cache, Cache]:
    """Caches of a prefill and a decode engine that differ in order and tensor-parallel size."""
    sizes = draw(st.sampled_from(PAIRS))
    heads = [num for num in HEADS if all(fits(num, size) for size in sizes)]
    layer = Attention(draw(st.sampled_from(heads)), draw(st.integers(1, 3)))
    model = (Group("full", (layer,) * draw(st.integers(1, 4))),)
    prefill, decode = (
        Cache(model, Engine(size, 3, (TOKENS,), (1,), order=draw(st.sampled_from(ORDERS))))
        for size in sizes
    )
    return prefill, decode


def num_common_runs(decode: Cache, rank: int, prefill: Cache, source: int) -> int:
    """Runs of neighbouring bytes of a block that are neighbours in the other engine too: by the
    meaning of each byte."""
    tables = (Table(0, (1,)),)
    own, theirs = held(decode, rank, 1, tables, TOKENS), held(prefill, source, 1, tables, TOKENS)
    places = dict(zip(theirs.tags.tolist(), theirs.offsets.tolist(), strict=True))
    pairs = sorted(
        (offset, places[tag])
        for offset, tag in zip(own.offsets.tolist(), own.tags.tolist(), strict=True)
        if tag in places
    )
    here, there = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return bool(len(pairs)) + int(((np.diff(here) != 1) | (np.diff(there) != 1)).sum())


@given(engine_pairs())
@examples(50)
def test_a_block_is_read_in_the_longest_common_runs(engines: tuple[Cache, Cache]) -> None:
    prefill, decode = engines
    for rank in range(decode.engine.tp_size):
        for source in range(prefill.engine.tp_size):
            plan = plan_read(
                describe(decode, rank), describe(prefill, source), local_device=0, remote_device=0
            )
            if not plan.sections:
                continue  # this rank reads these heads from another replica, or not at all
            pairs = plan.pairs([Blocks(0, [1])], [[1]], num_tokens=TOKENS, num_remote_tokens=TOKENS)
            fewest = num_common_runs(decode, rank, prefill, source)
            assert fewest <= len(pairs.local) <= fewest + num_chances(decode, prefill)


def num_chances(decode: Cache, prefill: Cache) -> int:
    """How many runs the plan may have more. Where one side keeps a token's heads together and the
    other a head's tokens, it is read token by token, and one layer's last byte is not joined with
    the next one's first, which can be neighbours on both sides."""
    orders = {
        one.engine.order.index("H") < one.engine.order.index("N") for one in (decode, prefill)
    }
    return 0 if len(orders) == 1 else len(decode.model[0].layers) - 1
