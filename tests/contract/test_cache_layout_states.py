"""Where the connector says that a state's parts are, against vLLM's own views of the state; and
that what one engine's views hold arrives in those of an engine of another size."""

import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec

from tests.contract.vllm_caches import make_caches, state_views
from tests.kit.descriptors import expand_rows
from vllm_commext.compat import kv_connector
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import CacheLayout, StateGeometry, check_layout
from vllm_commext.nixl.geometry.plan import Blocks, plan_read
from vllm_commext.nixl.geometry.topology import Rank, sources
from vllm_commext.nixl.vllm_cache import ModelFacts, cache_layout

MAX_LENGTH = 4096
DTYPES = (torch.bfloat16, torch.float32)
HEADS, HEAD_DIM, STATE_SIZE = 4, 8, 16
LENGTH = 3


@dataclass(frozen=True)
class Model:
    """A state-space layer of a whole model; ``parts``: name, units of the whole model and channels
    of a unit, in the order in which the layer's input projections lie in the convolution's
    state."""

    kind: Kind
    parts: tuple[tuple[str, int, int], ...]
    num_groups: int | None = None

    def num_units(self, part: str) -> int:
        """Units of a part in the whole model; a recurrent state has one for each head."""
        found = {name: num_units for name, num_units, _ in self.parts}
        return found.get(part) or (found["x"] if self.kind is Kind.MAMBA1 else HEADS)

    def spec(self, tp_size: int) -> MambaSpec:
        """A rank's specification, of shapes that vLLM computes."""
        calculator = MambaStateShapeCalculator
        inner = HEADS * HEAD_DIM
        if self.kind is Kind.MAMBA2:
            shapes = calculator.mamba2_state_shape(
                tp_size, inner, self.num_groups or 0, HEADS, HEAD_DIM, STATE_SIZE, LENGTH + 1
            )
        elif self.kind is Kind.GDN_ATTN:
            shapes = calculator.gated_delta_net_state_shape(
                tp_size, 2, HEADS, STATE_SIZE, HEAD_DIM, LENGTH + 1
            )
        elif self.kind is Kind.MAMBA1:
            shapes = calculator.mamba1_state_shape(tp_size, inner, STATE_SIZE, LENGTH + 1)
        else:
            shapes = calculator.short_conv_state_shape(tp_size, inner, LENGTH + 1)
        return MambaSpec(
            block_size=MAX_LENGTH,
            shapes=shapes,
            dtypes=DTYPES[: len(shapes)],
            page_size_padded=8192,
            mamba_type=self.kind,
        )


def mamba2(num_groups: int) -> Model:
    pair = (num_groups, STATE_SIZE)
    parts = (("x", HEADS, HEAD_DIM), ("B", *pair), ("C", *pair))
    return Model(Kind.MAMBA2, parts, num_groups)


MODELS = {
    "mamba2, 1 group": mamba2(1),
    "mamba2, 2 groups": mamba2(2),
    "mamba2, 4 groups": mamba2(4),
    "gated delta net": Model(
        Kind.GDN_ATTN, (("q", 2, STATE_SIZE), ("k", 2, STATE_SIZE), ("v", HEADS, HEAD_DIM))
    ),
    "mamba1": Model(Kind.MAMBA1, (("x", HEADS * HEAD_DIM, 1),)),
    "short convolution": Model(Kind.SHORT_CONV, (("conv", HEADS * HEAD_DIM, 1),)),
}


@pytest.fixture(params=["DS", "SD"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Channels first or last, as vLLM is told."""
    utils = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    monkeypatch.setenv(kv_connector.CONV_STATE_LAYOUT, request.param)
    utils.get_conv_state_layout.cache_clear()
    yield request.param
    utils.get_conv_state_layout.cache_clear()


@dataclass(frozen=True)
class Engine:
    """One rank's cache: two state-space layers that share their memory with attention."""

    model: Model
    rank: Rank
    config: KVCacheConfig
    caches: dict[str, torch.Tensor]
    layout: CacheLayout

    @classmethod
    def of(cls, model: Model, rank: Rank) -> "Engine":
        attention = FullAttentionSpec(
            block_size=64 * rank.size, num_kv_heads=4 // rank.size, head_size=8, dtype=DTYPES[0]
        )
        spec = model.spec(rank.size)
        config, caches = make_caches({"attn": attention, "ssm.0": spec, "ssm.1": spec})
        backends = {"attn": "FLASH_ATTN"}
        facts = ModelFacts(rank, 4, model.num_groups, kv_connector.is_dim_first(), backends)
        layout = cache_layout(caches, config, facts)
        check_layout(layout)
        return cls(model, rank, config, caches, layout)

    def views(self, name: str) -> dict[str, torch.Tensor]:
        """Part name to vLLM's view of it, ``[blocks, units, channels of a unit, ...]``."""
        conv, *recurrent = state_views(self.caches[name], self.model.spec(self.rank.size))
        conv = conv if kv_connector.is_dim_first() else conv.transpose(1, 2)
        found, channel = {}, 0
        for part, num_units, width in self.model.parts:
            held = max(1, num_units // self.rank.size)
            view = conv[:, channel : channel + held * width]
            found[part] = view.unflatten(1, (held, width))
            channel += held * width
        assert channel == conv.shape[1]
        return found | dict(zip(("ssm",), recurrent, strict=False))


LOCAL, REMOTE = 0, 3
"""Blocks of group 0; each group has the one after: they lie over the same bytes."""


def shards(engine: Engine, first_block: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Layer and part, vLLM's view of its block, and the rank's share of a model's random state."""
    dice = torch.Generator().manual_seed(7)
    for number, group in enumerate(engine.config.kv_cache_groups):
        for layer in group.layer_names if engine.layout.groups[number].kind == "state" else ():
            for part, view in engine.views(layer).items():
                num_units = engine.model.num_units(part)
                whole = torch.randn(num_units, *view.shape[2:], generator=dice).to(view.dtype)
                held = max(1, num_units // engine.rank.size)
                first = engine.rank.index * num_units // engine.rank.size
                yield f"{layer}.{part}", view[first_block + number], whole[first : first + held]


def read(reader: Engine, source: Engine) -> None:
    """Copy what the plan says of the states, byte by byte."""
    plan = plan_read(reader.layout, source.layout, local_device=0, remote_device=0)
    own, theirs = expand_rows(plan.local_rows), expand_rows(plan.remote_rows)
    states = [
        number if group.kind == "state" else None
        for number, group in enumerate(reader.layout.groups)
    ]
    pairs = plan.pairs(
        [Blocks(0, [] if number is None else [LOCAL + number]) for number in states],
        [[] if number is None else [REMOTE + number] for number in states],
        num_tokens=0,
        num_remote_tokens=0,
    )
    for to, start in zip(pairs.local.tolist(), pairs.remote.tolist(), strict=True):
        assert own[to, 1] == theirs[start, 1]
        ctypes.memmove(int(own[to, 0]), int(theirs[start, 0]), int(own[to, 1]))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("order")
def test_what_one_engine_holds_arrives_in_the_views_of_another(
    name: str, prefill: int, decode: int
) -> None:
    model = MODELS[name]
    if 4 in (prefill, decode) and (model.kind is Kind.GDN_ATTN or model.num_groups == 2):
        pytest.skip("vLLM does not split it that way")
    engines = [Engine.of(model, Rank(prefill, index)) for index in range(prefill)]
    for engine in engines:
        for _, view, share in shards(engine, REMOTE):
            view.copy_(share)
    for index in range(decode):
        reader = Engine.of(model, Rank(decode, index))
        for source in sources(reader.layout.splits(), reader.rank, prefill).read:
            read(reader, engines[source])
        for part, view, expected in shards(reader, LOCAL):
            assert torch.equal(view, expected), part


def test_rings_beside_the_states_are_refused() -> None:
    spec = mamba2(2).spec(1)
    more: dict[str, Any] = {
        "shapes": (*spec.shapes, (HEADS, 4, HEAD_DIM)),
        "dtypes": (*spec.dtypes, torch.float32),
    }
    odd = MambaSpec(block_size=MAX_LENGTH, mamba_type=Kind.MAMBA2, page_size_padded=8192, **more)
    config, caches = make_caches({"a": odd})
    facts = ModelFacts(Rank(1, 0), 4, 2, kv_connector.is_dim_first(), {})
    with pytest.raises(UnsupportedError, match="is not known"):
        cache_layout(caches, config, facts)


def test_another_number_of_groups_than_the_model_tells_is_refused() -> None:
    config, caches = make_caches({"a": mamba2(2).spec(1)})
    facts = ModelFacts(Rank(1, 0), 4, 4, kv_connector.is_dim_first(), {})
    with pytest.raises(UnsupportedError, match="expected 4 groups of B"):
        cache_layout(caches, config, facts)


def test_a_state_that_every_rank_holds_whole() -> None:
    values = {**vars(MODELS["short convolution"].spec(1)), "tp_replicated": True}
    config, caches = make_caches({"a": MambaSpec(**values)})
    facts = ModelFacts(Rank(2, 1), 4, None, kv_connector.is_dim_first(), {})
    (family,) = cache_layout(caches, config, facts).families
    assert isinstance(family.geometry, StateGeometry)
    (part,) = family.geometry.parts
    assert (part.num_units, part.replicated) == (HEADS * HEAD_DIM, True)
