"""The description of a reference cache, as a worker would send it to its peers."""

from tests.unit.nixl.reference_cache import Attention, Cache, Region, State
from vllm_commext.nixl.geometry.layout import (
    TOKENS,
    AttentionGeometry,
    CacheLayout,
    Family,
    Geometry,
    Group,
    StateGeometry,
)
from vllm_commext.nixl.geometry.mamba import StateTensor, state_parts

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}


def describe(cache: Cache, rank: int, address: int = 1 << 20) -> CacheLayout:
    """The layout of a rank whose memory begins at ``address``."""
    members: dict[tuple[int, Geometry], dict[str, int]] = {}
    for region in cache.regions:
        key = (region.group, geometry_of(cache, region))
        members.setdefault(key, {})[region.name] = address + region.base
    families = [
        Family(group, sorted(regions), [regions[name] for name in sorted(regions)], geometry)
        for (group, geometry), regions in members.items()
    ]
    sizes = cache.engine.block_sizes
    return CacheLayout(
        tp_size=cache.engine.tp_size,
        tp_rank=rank,
        num_blocks=cache.engine.num_blocks,
        groups=[Group(group.kind, size) for group, size in zip(cache.model, sizes, strict=True)],
        families=sorted(families, key=lambda family: family.names[0]),
    )


def geometry_of(cache: Cache, region: Region) -> Geometry:
    if isinstance(region.layer, State):
        parts = state_parts(
            region.layer.kind,
            tensors_of(cache, region.layer),
            dim_first=cache.engine.dim_first,
            tp_size=cache.engine.tp_size,
            num_groups=region.layer.num_groups if region.layer.kind == "mamba2" else None,
            replicated=region.layer.replicated,
        )
        return StateGeometry(cache.engine.num_blocks, region.row_stride, parts)
    return _attention(cache, region, region.layer)


def _attention(cache: Cache, region: Region, layer: Attention) -> AttentionGeometry:
    rows = cache.engine.rows_per_block[region.group]
    return AttentionGeometry(
        num_rows=cache.engine.num_blocks * rows,
        rows_per_block=rows,
        row_stride=region.row_stride,
        row_tokens=cache.row_tokens(region.group),
        num_heads=layer.num_heads,
        replicated=layer.latent,
        num_planes=layer.num_planes,
        head_stride=region.strides["H"],
        token_stride=layer.token_bytes if layer.packed else region.strides["N"],
        token_bytes=layer.token_bytes,
        content="SOME_BACKEND" if layer.packed else TOKENS,
        dtype="uint8",
    )


def tensors_of(cache: Cache, layer: State) -> list[StateTensor]:
    shape = (cache.num_channels(layer), layer.length)
    conv = StateTensor(
        shape if cache.engine.dim_first else shape[::-1], layer.conv_item, DTYPES[layer.conv_item]
    )
    if layer.kind == "short_conv":
        return [conv]
    heads = cache.num_units(layer.num_heads, layer.replicated)
    inner = (layer.state_size,) if layer.kind == "mamba1" else (layer.head_dim, layer.state_size)
    return [conv, StateTensor((heads, *inner), layer.ssm_item, DTYPES[layer.ssm_item])]
