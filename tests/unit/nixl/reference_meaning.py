"""What KV caches hold, from the meaning of the data alone: the reference for the planner.

A byte that has a meaning carries a tag, a positive number made of request, layer, part, unit (head,
group or channel of the whole model), place (token, or position in a convolution) and byte. A byte
without one carries a negative number that is found nowhere else. Copied tags therefore show, byte
for byte, what came from where and whether anything else was touched. ``as_bytes`` makes bytes of
them for memory that is really transferred.

Nothing here knows how a read is planned."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.unit.nixl.reference_cache import Attention, Cache, Region, State, Table, units_held

Int64Array = npt.NDArray[np.int64]

PLANES = ("keys", "values")
PARTS = (*PLANES, "x", "B", "C", "q", "k", "v", "conv", "ssm")


@dataclass(frozen=True)
class Held:
    """Bytes with a meaning: ``tags[i]`` at ``offsets[i]``."""

    offsets: Int64Array
    tags: Int64Array


def held(cache: Cache, rank: int, request: int, tables: Sequence[Table], num_tokens: int) -> Held:
    """What a rank holds of a request after ``num_tokens`` tokens, in these blocks."""
    found = [
        piece
        for region in cache.regions
        for piece in (
            _tokens_held(cache, region, rank, request, tables[region.group], num_tokens)
            if isinstance(region.layer, Attention)
            else _state_held(cache, region, rank, request, tables[region.group])
        )
    ]
    return Held(*(np.concatenate([piece[column].ravel() for piece in found]) for column in (0, 1)))


def beyond(cache: Cache, tables: Sequence[Table], num_tokens: int) -> Int64Array:
    """Offsets of the request's own bytes behind its last token, in the block of that token."""
    found = [np.empty(0, dtype=np.int64)]
    for region in cache.regions:
        if isinstance(region.layer, Attention):
            block_size = cache.engine.block_sizes[region.group]
            end = -(-num_tokens // block_size) * block_size
            first = max(num_tokens, tables[region.group].first * block_size)
            tokens = np.arange(first, max(first, end))
            found.append(_token_offsets(cache, region, tables[region.group], tokens).ravel())
    return np.concatenate(found)


def _token_offsets(cache: Cache, region: Region, table: Table, tokens: Int64Array) -> Int64Array:
    """``[tokens, planes*heads, bytes]``"""
    assert isinstance(region.layer, Attention)
    position, within = np.divmod(tokens, cache.engine.block_sizes[region.group])
    blocks = np.asarray(table.block_ids, dtype=np.int64)[position - table.first]
    row, token = np.divmod(within, cache.row_tokens(region.group))
    rows = blocks * cache.engine.rows_per_block[region.group] + row
    strides = region.strides
    return (
        (region.base + rows * region.row_stride + token * strides["N"])[:, None, None]
        + (np.arange(cache.row_heads(region.layer)) * strides["H"])[None, :, None]
        + (np.arange(region.layer.token_bytes) * strides["C"])[None, None, :]
    )


def _tokens_held(
    cache: Cache, region: Region, rank: int, request: int, table: Table, num_tokens: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    layer = region.layer
    assert isinstance(layer, Attention)
    block_size = cache.engine.block_sizes[region.group]
    end = (table.first + len(table.block_ids)) * block_size
    tokens = np.arange(table.first * block_size, min(num_tokens, end))
    heads = units_held(layer.num_heads, cache.engine.tp_size, rank, layer.latent)
    offsets = _token_offsets(cache, region, table, tokens)
    for plane in range(layer.num_planes):
        tags = _tags(request, region, PLANES[plane], heads, tokens, layer.token_bytes)
        own = offsets[:, plane * len(heads) : (plane + 1) * len(heads)]
        yield own, tags.transpose(1, 0, 2)


def _state_held(
    cache: Cache, region: Region, rank: int, request: int, table: Table
) -> Iterator[tuple[Int64Array, Int64Array]]:
    layer, engine = region.layer, cache.engine
    assert isinstance(layer, State)
    (block,) = table.block_ids
    start = region.base + block * region.row_stride
    num_channels, item = cache.num_channels(layer), layer.conv_item
    steps = (layer.length * item, item) if engine.dim_first else (item, num_channels * item)
    first = 0
    for name, num_units, size in layer.projections:
        units = units_held(num_units, engine.tp_size, rank, layer.replicated)
        channels = [unit * size + channel for unit in units for channel in range(size)]
        tags = _tags(request, region, name, channels, np.arange(layer.length), item)
        places = np.arange(first, first + len(channels))
        yield start + _grid(places * steps[0], np.arange(layer.length) * steps[1], item), tags
        first += len(channels)
    heads = units_held(layer.num_heads, engine.tp_size, rank, layer.replicated)
    size = layer.recurrent_bytes
    start += num_channels * layer.length * item
    offsets = start + _grid(np.arange(len(heads)) * size, np.zeros(1, dtype=np.int64), size)
    yield offsets, _tags(request, region, "ssm", heads, np.zeros(1, dtype=np.int64), size)


def _grid(units: Int64Array, places: Int64Array, num_bytes: int) -> Int64Array:
    return units[:, None, None] + places[None, :, None] + np.arange(num_bytes)[None, None, :]


def _tags(
    request: int,
    region: Region,
    part: str,
    units: Sequence[int],
    places: Int64Array,
    num_bytes: int,
) -> Int64Array:
    """``[units, places, bytes]``"""
    start = ((request << 8) + region.number << 5) + PARTS.index(part) << 42
    return start + _grid(np.asarray(units, dtype=np.int64) << 28, places << 14, num_bytes)


def nothing_held(cache: Cache, side: int, rank: int) -> Int64Array:
    return -1 - ((side * 64 + rank) << 32) - np.arange(cache.num_bytes, dtype=np.int64)


def as_bytes(tags: Int64Array) -> npt.NDArray[np.uint8]:
    """A byte for each tag, by a multiplicative hash in which every bit of the tag counts."""
    mixed = tags.astype(np.uint64)
    for shift in (31, 27, 33):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


def differences(
    right: Int64Array, found: npt.NDArray[np.generic], allowed: Int64Array
) -> Int64Array:
    """Offsets at which a rank's memory is not as it should be.

    Args:
        right: the tags that should be there.
        found: the tags that are, or bytes where the memory was made by ``as_bytes``.
        allowed: offsets that may hold anything.
    """
    wrong = found != (as_bytes(right) if found.dtype == np.uint8 else right)
    wrong[allowed] = False
    return np.flatnonzero(wrong)
