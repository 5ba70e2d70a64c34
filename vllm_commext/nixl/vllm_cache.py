"""From vLLM's cache tensors and specifications to the layout that peers are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import (
    FULL,
    PAGES,
    STATE,
    TOKENS,
    WINDOW,
    AttentionGeometry,
    CacheLayout,
    Family,
    Geometry,
    Group,
    StateGeometry,
    block_bytes,
)
from vllm_commext.nixl.geometry.mamba import (
    GATED_DELTA_NET,
    MAMBA1,
    MAMBA2,
    SHORT_CONV,
    StateTensor,
    compute_mamba_phys_ratio,
    state_parts,
)
from vllm_commext.nixl.geometry.topology import Rank, Split, check_even

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

SERVED_SPECS: Mapping[type[KVCacheSpec], str] = {
    FullAttentionSpec: FULL,
    MLAAttentionSpec: FULL,
    SlidingWindowSpec: WINDOW,
    ChunkedLocalAttentionSpec: WINDOW,
    MambaSpec: STATE,
}
_STATE_KINDS = {
    "MAMBA1": MAMBA1,
    "MAMBA2": MAMBA2,
    "GDN_ATTN": GATED_DELTA_NET,
    "SHORT_CONV": SHORT_CONV,
}
# Attention backends that keep the keys and values of a token and head side by side.
_BY_TOKEN = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
# Quantizations that leave them there; others keep scales in parts of a page of their own.
_IN_PLACE = ("NONE", "FP8_PER_TENSOR")


@dataclass(frozen=True)
class ModelFacts:
    """Facts that the cache's specifications leave out.

    Attributes:
        num_groups: groups of the B and C projections in the whole model, None where the model does
            not say.
    """

    rank: Rank
    num_kv_heads: int
    num_groups: int | None
    conv_dim_first: bool
    backends: Mapping[str, str]


def specs_of(spec: KVCacheSpec) -> Sequence[KVCacheSpec]:
    return (
        tuple(spec.kv_cache_specs.values())
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else (spec,)
    )


def groups_of(kv_cache_config: KVCacheConfig) -> list[Group]:
    return [
        Group(SERVED_SPECS[type(specs_of(one.kv_cache_spec)[0])], int(one.kv_cache_spec.block_size))
        for one in kv_cache_config.kv_cache_groups
    ]


def needs_zeroed_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """True if vLLM zeroes new blocks of attention before it uses them.

    Its scheduler decides, whose configuration has the type of a group's first layer alone: a
    worker's, in which the layers of a group differ, is asked as that.
    """
    groups = [
        replace(group, kv_cache_spec=specs_of(group.kv_cache_spec)[0])
        for group in kv_cache_config.kv_cache_groups
    ]
    return replace(kv_cache_config, kv_cache_groups=groups).needs_kv_cache_zeroing


def cache_layout(
    caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig, model: ModelFacts
) -> CacheLayout:
    """Describe cache tensors, one for each layer.

    Args:
        caches: layer name to its tensor: ``[rows, heads, tokens, content]`` of attention, the
            whole blocks of a state-space layer.

    Raises:
        UnsupportedError: a layer's memory is of a form that cannot be described; says which.
    """
    members: dict[tuple[int, Geometry], dict[str, int]] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        seen: set[int] = set()
        for name in sorted(group.layer_names):
            spec, cache = _spec_of_layer(group.kv_cache_spec, name), caches[name]
            geometry = _geometry(name, cache, spec, kv_cache_config.num_blocks, model)
            address = cache.data_ptr()
            if address not in seen:  # layers that share one cache are read once
                members.setdefault((number, geometry), {})[name] = address
                seen.add(address)
    families = [
        Family(number, list(regions), list(regions.values()), geometry)
        for (number, geometry), regions in members.items()
    ]
    layout = CacheLayout(
        tp_size=model.rank.size,
        tp_rank=model.rank.index,
        num_blocks=kv_cache_config.num_blocks,
        groups=groups_of(kv_cache_config),
        families=sorted(families, key=lambda family: family.names[0]),
    )
    _check_shared_blocks(layout)
    return layout


def _spec_of_layer(spec: KVCacheSpec, name: str) -> KVCacheSpec:
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _geometry(
    name: str, cache: torch.Tensor, spec: KVCacheSpec, num_blocks: int, model: ModelFacts
) -> Geometry:
    if SERVED_SPECS.get(type(spec)) == STATE:
        return _describe_states(name, cache, spec, num_blocks, model)
    if isinstance(spec, AttentionSpec):
        return _attention_geometry(name, cache, spec, num_blocks, model)
    raise UnsupportedError(f"layer {name}: a cache of {type(spec).__name__} cannot be transferred")


def _attention_geometry(
    name: str, cache: torch.Tensor, spec: AttentionSpec, num_blocks: int, model: ModelFacts
) -> AttentionGeometry:
    if cache.dim() == 3:  # latent attention before the head dimension was always there
        cache = cache.unsqueeze(1)
    rows_per_block, rest = divmod(cache.shape[0], num_blocks)
    num_planes, odd = divmod(cache.shape[1], spec.num_kv_heads) if cache.dim() == 4 else (0, 0)
    tokens = rows_per_block * cache.shape[2] if cache.dim() == 4 else 0
    if rest or odd or num_planes not in (1, 2) or tokens != spec.block_size or cache.stride(3) != 1:
        raise UnsupportedError(
            f"layer {name}: expected a cache [blocks, heads, tokens, content] of {num_blocks} "
            f"blocks of {spec.block_size} tokens and {spec.num_kv_heads} heads, got shape "
            f"{tuple(cache.shape)} with strides {cache.stride()}"
        )
    replicated = isinstance(spec, MLAAttentionSpec)
    strides = [stride * cache.element_size() for stride in cache.stride()]
    geometry = AttentionGeometry(
        num_rows=cache.shape[0],
        rows_per_block=rows_per_block,
        row_stride=strides[0],
        row_tokens=cache.shape[2],
        num_heads=spec.num_kv_heads if replicated else _all_heads(name, spec, model),
        replicated=replicated,
        num_planes=num_planes,
        head_stride=strides[1],
        token_stride=strides[2],
        token_bytes=cache.shape[3] * cache.element_size(),
        content=_content(name, spec, model),
        dtype=str(cache.dtype).removeprefix("torch."),
    )
    check_even(geometry.split, model.rank.size, f"layer {name}, KV heads")
    return geometry


def _all_heads(name: str, spec: AttentionSpec, model: ModelFacts) -> int:
    if spec.num_kv_heads == max(1, model.num_kv_heads // model.rank.size):
        return model.num_kv_heads
    if spec.num_kv_heads > 1 or model.rank.size == 1:
        return spec.num_kv_heads * model.rank.size
    raise UnsupportedError(
        f"layer {name}: a rank of {model.rank.size} holds 1 KV head, and the model's "
        f"{model.num_kv_heads} are not this layer's: whether it is replicated is not known"
    )


def _content(name: str, spec: AttentionSpec, model: ModelFacts) -> str:
    """``TOKENS`` if a token can be moved alone; latent attention has one head and keeps tokens
    apart, but for the indexer of sparse attention, whose scales stand behind a block's tokens."""
    quantization = spec.kv_quant_mode.name
    if quantization not in _IN_PLACE:
        return PAGES + quantization
    if isinstance(spec, MLAAttentionSpec) and spec.cache_role.name == "INDEXER":
        return f"{PAGES}INDEXER"
    backend = model.backends.get(name, "an unknown backend")
    if isinstance(spec, MLAAttentionSpec) or backend in _BY_TOKEN:
        return TOKENS
    return backend


def _describe_states(
    name: str, cache: torch.Tensor, spec: Any, num_blocks: int, model: ModelFacts
) -> StateGeometry:
    """``cache`` is ``[blocks, 1, 1, bytes]``: the states of a block follow one another."""
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    if kind not in _STATE_KINDS:
        raise UnsupportedError(
            f"layer {name}: a state of type {kind} cannot be transferred yet, expected one of "
            f"{sorted(_STATE_KINDS)}"
        )
    if cache.shape[0] != num_blocks or cache.stride(-1) != 1:
        raise UnsupportedError(
            f"layer {name}: expected the states of each of {num_blocks} blocks in one run, got "
            f"shape {tuple(cache.shape)} with strides {cache.stride()}"
        )
    tensors = [
        StateTensor(tuple(shape), dtype.itemsize, str(dtype).removeprefix("torch."))
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    parts = state_parts(
        _STATE_KINDS[kind],
        tensors,
        dim_first=model.conv_dim_first,
        tp_size=model.rank.size,
        num_groups=model.num_groups,
        replicated=spec.tp_replicated,
    )
    for part in parts:
        check_even(part.split, model.rank.size, f"layer {name}, {part.name}")
    return StateGeometry(num_blocks, cache.stride(0) * cache.element_size(), parts)


def _check_shared_blocks(layout: CacheLayout) -> None:
    """A state must fit into the block that attention layers of the same pool make of it."""
    rows = [one.geometry for one in layout.families if isinstance(one.geometry, AttentionGeometry)]
    for family in layout.families:
        if not isinstance(family.geometry, StateGeometry):
            continue
        state_bytes = block_bytes(layout, family)
        needed = compute_mamba_phys_ratio(state_bytes, family.geometry.row_stride)
        if needed > 1 or any(
            compute_mamba_phys_ratio(state_bytes, one.row_stride) > one.rows_per_block
            for one in rows
        ):
            raise UnsupportedError(
                f"layer {family.names[0]}: a state of {state_bytes} bytes does not fit into a block"
            )


class Stage(msgspec.Struct, frozen=True):
    """The message of one stage's worker to those of the others.

    Attributes:
        splits: every way in which something is dealt out to its tensor-parallel ranks.
    """

    names: list[str]
    splits: list[Split]


_STAGE = msgspec.msgpack.Decoder(Stage)


@dataclass(frozen=True)
class Pipeline:
    """A worker's place among the stages of its engine.

    Attributes:
        gather: all-gathers bytes over the same rank of each stage, in their order.
    """

    size: int = 1
    index: int = 0
    gather: Callable[[bytes], list[bytes]] = lambda own: [own]

    def check_caches(self, num_caches: int) -> None:
        """Refuse a stage that has nothing to be read; raises UnsupportedError."""
        if not num_caches:
            raise UnsupportedError(
                f"expected layers with a KV cache in each of {self.size} pipeline stages, got none "
                f"in stage {self.index}: divide the layers otherwise (VLLM_PP_LAYER_PARTITION), or "
                "start with fewer stages"
            )

    def place(self, layout: CacheLayout) -> tuple[CacheLayout, frozenset[Split]]:
        """A stage's own layout with its place among all stages, and all of their splits."""
        if self.size == 1:
            return layout, layout.splits()
        own = Stage(sorted(layout.own_names()), sorted(layout.splits()))
        stages = [_STAGE.decode(one) for one in self.gather(msgspec.msgpack.encode(own))]
        names = [stage.names for stage in stages]
        splits = frozenset(split for stage in stages for split in stage.splits)
        return msgspec.structs.replace(layout, pp_rank=self.index, stages=names), splits


ONE_STAGE = Pipeline()  # the place of a worker whose engine has no others


def gather_bytes(own: bytes, group: torch.distributed.ProcessGroup) -> list[bytes]:
    """All-gather bytes over a group on CPUs, bounded by the group's time-out, without pickle."""
    counts = _gather(torch.tensor([len(own)], dtype=torch.int64, device="cpu"), group)
    sizes = [int(count) for count in counts]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(own)] = torch.tensor(list(own), dtype=torch.uint8, device="cpu")
    said = _gather(padded, group)
    return [one[:size].numpy().tobytes() for one, size in zip(said, sizes, strict=True)]


def _gather(own: torch.Tensor, group: torch.distributed.ProcessGroup) -> Sequence[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([found], [own]).wait()
    return found
