"""Reference engines whose layers are dealt out to pipeline stages."""

import copy
from collections.abc import Sequence

import msgspec

from tests.unit.nixl.reference_cache import Cache
from tests.unit.nixl.reference_layout import describe
from vllm_commext.nixl.geometry.layout import CacheLayout, check_layout

Stages = list[list[str]]


def names_of(cache: Cache) -> list[str]:
    return [region.name for region in cache.regions]


def cut(names: Sequence[str], ends: Sequence[int]) -> Stages:
    """Stages that end behind these positions, the last one behind the last layer."""
    bounds = [0, *sorted(set(ends)), len(names)]
    return [list(names[one:two]) for one, two in zip(bounds, bounds[1:], strict=False)]


def stage_of(cache: Cache, names: Sequence[str]) -> Cache:
    """The same memory, with a meaning only where these layers are."""
    one = copy.copy(cache)
    one.regions = [region for region in cache.regions if region.name in names]
    return one


def described(cache: Cache, dealt: Stages, stage: int, rank: int, address: int) -> CacheLayout:
    """The layout of one worker, whose memory begins at ``address``."""
    layout = describe(stage_of(cache, dealt[stage]), rank, address)
    layout = msgspec.structs.replace(layout, pp_rank=stage, stages=dealt)
    check_layout(layout)
    return layout
