"""A lossless code for 16-bit words whose exponents, as those of bfloat16, are mostly of few values.

Of each word the sign and the seven bits of the mantissa stay as they are; the eight of the exponent
become three: how far it is below the block's *top*, or that it is an escape, which is listed.  So
11 bits of 16 are left, and eight for each escape.  What the words mean does not matter, any come
back bit by bit; those that have too many escapes are refused.

A packed part is a byte of each word, three bits of each, a byte of each block and room for escapes.
Its length follows from the number of blocks and a *level*, how much room there is: the two sides
agree on all places by one small number, and nothing in a part says where anything is.

Runs on the device that the memory is on, a step at a time, by torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_commext.errors import ProtocolError

BLOCK = 2048
"""Words that share a top."""
BLOCK_BYTES = 2 * BLOCK
ESCAPE = 7
LEVEL_BITS = 6
MAX_LEVEL = (1 << LEVEL_BITS) - 1
ROOM = BLOCK // 512
"""Escapes of a block for which a level has room; more than an eighth of the words are none."""
SAMPLE = 7
"""Of so many words one is looked at for its block's top; odd, to come across every element of a
token."""
STEP_BLOCKS, PIECE_BLOCKS = {"cpu": 32, "cuda": 1024}, {"cpu": 16, "cuda": 1024}
"""Coded at a time, and of them so many by one call of torch's: for more words it would take further
threads of the CPU, which the engine computes with."""
_PLANES = 8


class Regions(NamedTuple):
    """Views of a packed part."""

    rest: torch.Tensor
    codes: torch.Tensor
    tops: torch.Tensor
    escapes: torch.Tensor

    def at(self, part: slice) -> Regions:
        """Views of some blocks."""
        return Regions(self.rest[part], self.codes[part], self.tops[part], self.escapes)


def num_blocks(num_bytes: int) -> int:
    """Blocks of a part of so many bytes; the last one takes in what lies behind it."""
    return -(-num_bytes // BLOCK_BYTES)


def packed_bytes(blocks: int, level: int) -> int:
    """Length of a packed part."""
    return blocks * (BLOCK + BLOCK * 3 // 8 + 1 + level * ROOM)


def max_level(blocks: int) -> int:
    """The last level at which a part becomes shorter."""
    return min(MAX_LEVEL, (blocks * BLOCK_BYTES - packed_bytes(blocks, 0)) // (blocks * ROOM))


def regions(memory: torch.Tensor, blocks: int, level: int) -> Regions:
    """Where everything is in a slot, ``[n]`` uint8, of at least ``packed_bytes``."""
    sizes = (blocks * BLOCK, blocks * BLOCK * 3 // 8, blocks, blocks * level * ROOM)
    rest, codes, tops, escapes = memory[: sum(sizes)].split(sizes)
    planes = codes.view(blocks, 3, BLOCK // _PLANES)
    return Regions(rest.view(blocks, BLOCK), planes, tops.view(blocks, 1), escapes)


def _slices(blocks: int, size: int) -> Iterator[slice]:
    for begin in range(0, blocks, size):
        yield slice(begin, min(begin + size, blocks))


def encode(source: torch.Tensor, target: torch.Tensor, num_bytes: int) -> Iterator[int]:
    """Pack a part in steps.

    Args:
        source: ``[n]`` uint8, whole blocks.
        target: ``[n]`` uint8, of the same size.
        num_bytes: of the source's that count.

    Yields:
        After each step 0, after the last one the level; nothing at all for words that do not become
        shorter.
    """
    blocks = num_blocks(num_bytes)
    highest = max_level(blocks)
    views, count = regions(target, blocks, highest), 0
    words = source[: blocks * BLOCK_BYTES].view(torch.int16).view(blocks, BLOCK)
    for part in _slices(blocks, STEP_BLOCKS[source.device.type]):
        escapes = _encode_step(words[part], views.at(part))
        end = count + len(escapes)
        if end > len(views.escapes):
            return
        views.escapes[count:end] = escapes
        count = end
        if part.stop < blocks:
            yield 0
    yield max(1, -(-count // (blocks * ROOM)))


def _encode_step(words: torch.Tensor, to: Regions) -> torch.Tensor:
    """Pack some blocks; returns the exponents that escape."""
    pieces = [*_slices(len(words), PIECE_BLOCKS[words.device.type])]
    exponents, codes = torch.empty_like(to.rest), torch.empty_like(to.rest)
    for part in pieces:
        exponents[part] = words[part] >> 7
        # The mantissa, then the sign; what is above is cut off.
        to.rest[part] = (words[part] << 1).sub_(words[part] >> 15)
    tops = to.tops.copy_(_tops(exponents))
    for part in pieces:
        torch.sub(tops[part], exponents[part], out=codes[part]).clamp_(max=ESCAPE)
    c = codes.view(len(codes), _PLANES, -1).unbind(1)
    low, middle, high = to.codes.unbind(1)  # what does not fit one begins the next
    torch.add(torch.add(c[0], c[1], alpha=8), c[2], alpha=64, out=low)
    torch.add((c[2] >> 2).add_(c[3], alpha=2).add_(c[4], alpha=16), c[5], alpha=128, out=middle)
    torch.add((c[5] >> 1).add_(c[6], alpha=4), c[7], alpha=32, out=high)
    groups, escapes = _escapes(codes, pieces)
    return exponents.view(torch.int64).flatten()[groups].view(torch.uint8)[escapes]


def _escapes(codes: torch.Tensor, pieces: Sequence[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which groups of eight codes have escapes, and which codes of theirs these are: to look at
    every code for itself takes several times as long."""
    marks = torch.empty_like(codes)
    for part in pieces:
        torch.bitwise_right_shift(codes[part] + 1, 3, out=marks[part])
    in_groups = marks.view(torch.int64).flatten()
    groups = in_groups.nonzero().squeeze(1)
    return groups, in_groups[groups].view(torch.bool)


def _tops(exponents: torch.Tensor) -> torch.Tensor:
    """The exponent of each block, ``[n, 1]``, from which on down codes reach most of a sample's."""
    sample = exponents[:, ::SAMPLE].long()
    counts = torch.zeros(len(sample), 256 + ESCAPE, device=sample.device, dtype=torch.int32)
    counts.scatter_add_(1, sample + ESCAPE, torch.ones_like(sample, dtype=torch.int32))
    sums = counts.cumsum(1)
    return (sums[:, ESCAPE:] - sums[:, :-ESCAPE]).argmax(1, keepdim=True).to(torch.uint8)


def decode(source: torch.Tensor, target: torch.Tensor, num_bytes: int, level: int) -> Iterator[int]:
    """Unpack a part in steps, whatever is in it: only the target's blocks are written.

    Args:
        source: ``[n]`` uint8 that a peer has packed.
        target: ``[n]`` uint8, whole blocks.
        num_bytes: of the target's that count.
        level: as ``encode`` said.

    Raises:
        ProtocolError: there are more escapes than are listed.
    """
    blocks = num_blocks(num_bytes)
    if not 0 < level <= max_level(blocks):
        raise ProtocolError(f"expected levels 1 to {max_level(blocks)} of a part, got {level}")
    views, count = regions(source, blocks, level), 0
    words = target[: blocks * BLOCK_BYTES].view(torch.int16).view(blocks, BLOCK)
    for part in _slices(blocks, STEP_BLOCKS[source.device.type]):
        count += _decode_step(views.at(part), views.escapes[count:], words[part])
        yield 0


def _decode_step(packed: Regions, listed: torch.Tensor, words: torch.Tensor) -> int:
    """Unpack some blocks; returns how many exponents escaped."""
    pieces = [*_slices(len(words), PIECE_BLOCKS[words.device.type])]
    low, middle, high = packed.codes.unbind(1)
    codes = torch.empty_like(packed.rest)
    c = codes.view(len(codes), _PLANES, -1).unbind(1)
    torch.bitwise_and(low, 7, out=c[0])
    torch.bitwise_and(low >> 3, 7, out=c[1])
    torch.add(low >> 6, middle & 1, alpha=4, out=c[2])
    torch.bitwise_and(middle >> 1, 7, out=c[3])
    torch.bitwise_and(middle >> 4, 7, out=c[4])
    torch.add(middle >> 7, high & 3, alpha=2, out=c[5])
    torch.bitwise_and(high >> 2, 7, out=c[6])
    torch.bitwise_right_shift(high, 5, out=c[7])
    groups, escapes = _escapes(codes, pieces)
    count = int(escapes.sum())
    if count > len(listed):
        raise ProtocolError("expected a packed part, got more escapes than it lists")
    for part in pieces:
        torch.sub(packed.tops[part], codes[part], out=codes[part])
    exponents = codes.view(torch.int64).view(-1)
    found = exponents[groups]
    found.view(torch.uint8).masked_scatter_(escapes, listed)
    exponents[groups] = found
    for part in pieces:
        rest = packed.rest[part].to(torch.int16)
        torch.add(rest >> 1, codes[part].to(torch.int16), alpha=1 << 7, out=words[part])
        words[part].add_(rest, alpha=-1 << 15)
    return count
