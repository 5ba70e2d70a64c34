"""What the connector says of a cache's bytes, against those that vLLM's own views of it touch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from tests.contract.vllm_caches import make_caches
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import (
    AttentionGeometry,
    CacheLayout,
    Family,
    block_bytes,
    check_layout,
)
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.vllm_cache import ModelFacts, cache_layout

ALONE = Rank(1, 0)
NUM_HEADS = 4
VALUES: dict[str, Any] = {"block_size": 32, "head_size": 8, "dtype": torch.bfloat16}
WINDOW = SlidingWindowSpec(**VALUES, num_kv_heads=NUM_HEADS, sliding_window=64)
ORDERS = ["HND", "NHD", "blocks outermost"]
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
INDEXER = getattr(getattr(kv_cache_interface, "SparseCacheRole", None), "INDEXER", None)

Caches = Mapping[str, torch.Tensor]


def full(num_heads: int = NUM_HEADS, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**VALUES, "num_kv_heads": num_heads, **changes})


def describe(
    caches: Caches, config: KVCacheConfig, rank: Rank = ALONE, backend: str = "FLASH_ATTN"
) -> CacheLayout:
    facts = ModelFacts(rank, NUM_HEADS, None, True, dict.fromkeys(caches, backend))
    layout = cache_layout(caches, config, facts)
    check_layout(layout)
    return layout


def regions(layout: CacheLayout) -> Iterator[tuple[str, int, Family]]:
    for family in layout.families:
        for name, address in zip(family.names, family.base_addresses, strict=True):
            yield name, address, family


def touched(view: torch.Tensor, *index: Any) -> set[int]:
    """Addresses that writing there changes, in all of the memory that the view is a part of."""
    memory = torch.tensor([], dtype=torch.uint8).set_(view.untyped_storage()).numpy()
    memory[:] = 0
    view.view(torch.uint8)[index] = 255
    return set((np.flatnonzero(memory) + memory.ctypes.data).tolist())


def claimed(
    geometry: AttentionGeometry, address: int, row: int, head: int, tokens: Iterable[int]
) -> set[int]:
    start = address + row * geometry.row_stride + head * geometry.head_stride
    places = [start + token * geometry.token_stride for token in tokens]
    return {place + byte for place in places for byte in range(geometry.token_bytes)}


def assert_tokens_are_where_it_says(layout: CacheLayout, caches: Caches) -> None:
    """Some tokens, every head of some rows, and these rows as a whole."""
    for name, address, family in regions(layout):
        geometry, view = family.geometry, caches[name]
        assert isinstance(geometry, AttentionGeometry)
        view = view if view.dim() == 4 else view.unsqueeze(1)
        num_rows, num_heads, num_tokens, _ = view.shape
        assert (geometry.num_rows, geometry.row_tokens) == (num_rows, num_tokens)
        assert geometry.num_rows == layout.num_blocks * geometry.rows_per_block
        for row in (1, num_rows - 1):
            whole = set[int]()
            for head in range(num_heads):
                for token in (0, 1, num_tokens - 1):
                    found = touched(view, row, head, token)
                    assert claimed(geometry, address, row, head, [token]) == found
                found = claimed(geometry, address, row, head, range(num_tokens))
                assert found == touched(view, row, head)
                whole |= found
            assert whole == touched(view, row)


MODELS: dict[str, dict[str, KVCacheSpec]] = {
    "full attention": {f"l{n}": full() for n in range(3)},
    "heads of two sizes": {"a": full(), "b": full(head_size=16), "c": full()},
    "window and full attention": {"a": WINDOW, "b": full(), "c": WINDOW, "d": WINDOW},
    "chunks of float32": {f"l{n}": full(dtype=torch.float32) for n in range(2)},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model", MODELS)
def test_attention(model: str, order: str) -> None:
    config, caches = make_caches(MODELS[model], order=order)
    layout = describe(caches, config)
    assert sorted(name for name, _, _ in regions(layout)) == sorted(MODELS[model])
    assert_tokens_are_where_it_says(layout, caches)
    for family in layout.families:
        geometry = family.geometry
        assert isinstance(geometry, AttentionGeometry)
        assert (geometry.num_heads, geometry.replicated) == (NUM_HEADS, False)
        spec = MODELS[model][family.names[0]]
        assert block_bytes(layout, family) == spec.page_size_bytes
        kind = "window" if isinstance(spec, SlidingWindowSpec) else "full"
        assert (layout.groups[family.group].kind, geometry.content) == (kind, "tokens")
        assert layout.groups[family.group].block_size == 32


@pytest.mark.parametrize("order", ORDERS)
def test_latent_attention_has_one_head_on_every_rank(order: str) -> None:
    config, caches = make_caches({"a": LATENT, "b": LATENT}, order=order)
    for rank in (ALONE, Rank(2, 1)):
        layout = describe(caches, config, rank)
        assert_tokens_are_where_it_says(layout, caches)
        (family,) = layout.families
        assert isinstance(family.geometry, AttentionGeometry)
        assert (family.geometry.num_heads, family.geometry.replicated) == (1, True)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_kernel_blocks_smaller_than_the_managers(order: str) -> None:
    config, caches = make_caches(MODELS["full attention"], order=order, kernel_block_size=16)
    layout = describe(caches, config)
    assert_tokens_are_where_it_says(layout, caches)
    (family,) = layout.families
    assert isinstance(family.geometry, AttentionGeometry)
    assert (family.geometry.rows_per_block, family.geometry.row_tokens) == (2, 16)
    assert (layout.num_blocks, layout.groups[0].block_size) == (6, 32)
    # Block b of the manager is the kernel blocks 2b and 2b + 1.
    bytes_of = [touched(caches["l0"], slice(2 * b, 2 * b + 2)) for b in range(6)]
    assert len({len(found) for found in bytes_of}) == 1
    assert len(bytes_of[0]) == block_bytes(layout, family)


@pytest.mark.parametrize(
    ("size", "num_held"), [(1, 4), (2, 2), (4, 1), (8, 1)], ids=lambda value: str(value)
)
def test_the_heads_of_the_whole_model_are_told(size: int, num_held: int) -> None:
    config, caches = make_caches({"a": full(num_held)})
    layout = describe(caches, config, Rank(size, size - 1))
    (family,) = layout.families
    assert isinstance(family.geometry, AttentionGeometry)
    assert family.geometry.num_heads == NUM_HEADS
    assert block_bytes(layout, family) == full(num_held).page_size_bytes
    assert_tokens_are_where_it_says(layout, caches)


@pytest.mark.parametrize(
    ("backend", "content"), [("FLASH_ATTN", "tokens"), ("CPU_ATTN", "CPU_ATTN")]
)
def test_tokens_are_split_only_where_the_backend_keeps_them_apart(
    backend: str, content: str
) -> None:
    config, caches = make_caches({"a": full()})
    (family,) = describe(caches, config, backend=backend).families
    assert isinstance(family.geometry, AttentionGeometry)
    assert family.geometry.content == content


@pytest.mark.parametrize(
    ("dtype", "content"), [("auto", "tokens"), ("fp8_e4m3", "tokens"), ("nvfp4", "pages of NVFP4")]
)
def test_a_quantization_with_scales_of_its_own_makes_pages(dtype: str, content: str) -> None:
    spec = full(kv_quant_mode=get_kv_quant_mode(dtype), dtype=torch.uint8)
    config, caches = make_caches({"a": spec})
    (family,) = describe(caches, config, backend="FLASHINFER").families
    assert isinstance(family.geometry, AttentionGeometry)
    assert family.geometry.content == content


@pytest.mark.skipif(INDEXER is None, reason="this vLLM does not tell an indexer's cache apart")
def test_an_indexer_keeps_the_scales_of_a_block_behind_its_data() -> None:
    indexer = replace(LATENT, head_size=132, dtype=torch.uint8, cache_role=INDEXER)
    config, caches = make_caches({"latent": LATENT, "indexer": indexer})
    layout = describe(caches, config)
    contents = {name: family.geometry for name, _, family in regions(layout)}
    told = {name: getattr(geometry, "content", "") for name, geometry in contents.items()}
    assert told == {"latent": "tokens", "indexer": "pages of INDEXER"}


def test_layers_that_share_a_cache_are_told_once() -> None:
    config, caches = make_caches({"a": full(), "b": full()})
    config.kv_cache_groups[0].layer_names.append("c")
    caches["c"] = caches["a"]
    assert [name for name, _, _ in regions(describe(caches, config))] == ["a", "b"]


def test_a_head_that_may_or_may_not_be_replicated_is_refused() -> None:
    config, caches = make_caches({"a": full(1)})
    with pytest.raises(UnsupportedError, match="layer a: a rank of 2 holds 1 KV head"):
        describe(caches, config, Rank(2, 0))


@pytest.mark.parametrize("change", ["five dimensions", "half of the tokens", "columns first"])
def test_memory_of_another_form_is_refused(change: str) -> None:
    config, caches = make_caches({"a": full()})
    caches["a"] = {
        "five dimensions": caches["a"].unsqueeze(0),
        "half of the tokens": caches["a"][:, :, :16],
        "columns first": caches["a"].transpose(2, 3),
    }[change]
    with pytest.raises(UnsupportedError, match="layer a: expected a cache"):
        describe(caches, config)


def test_a_state_of_an_unknown_kind_is_refused() -> None:
    spec = MambaSpec(
        block_size=64,
        shapes=((2, 8, 8),),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.LINEAR,
    )
    config, caches = make_caches({"a": spec})
    with pytest.raises(UnsupportedError, match="layer a: a state of type LINEAR"):
        describe(caches, config)
