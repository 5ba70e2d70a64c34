"""The code for bfloat16: any words come back, what is packed is what a reader in plain Python takes
apart, and nothing that a peer sends is written beyond its part."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.gathered import exponents
from vllm_commext.nixl.gathered.exponents import (
    BLOCK,
    BLOCK_BYTES,
    ESCAPE,
    MAX_LEVEL,
    decode,
    encode,
    max_level,
    num_blocks,
    packed_bytes,
)

INFINITY, NAN, SUBNORMAL = 0x7F80, 0x7FC1, 0x0001
SPECIAL = (0, 0x8000, INFINITY, 0xFF80, NAN, 0xFFFF, SUBNORMAL, 0x807F, 0x7F7F)
Words = np.ndarray[Any, np.dtype[np.uint16]]


def memory(words: Words, num_bytes: int) -> torch.Tensor:
    """Of whole blocks, behind whose words there is something else."""
    kept = torch.full((num_blocks(num_bytes) * BLOCK_BYTES,), 0xA5, dtype=torch.uint8)
    kept[:num_bytes] = torch.from_numpy(words.view(np.uint8)[:num_bytes])
    return kept


def packed(words: Words) -> tuple[torch.Tensor, int]:
    """A part and its level, 0 where it does not become shorter."""
    source = memory(words, words.nbytes)
    target = torch.full_like(source, 0x5A)
    level = 0
    for found in encode(source, target, words.nbytes):
        level = found
    return target, level


def unpacked(part: torch.Tensor, num_bytes: int, level: int) -> Words:
    target = torch.zeros(num_blocks(num_bytes) * BLOCK_BYTES, dtype=torch.uint8)
    for _ in decode(part[: packed_bytes(num_blocks(num_bytes), level)], target, num_bytes, level):
        pass
    return target.numpy()[:num_bytes].view(np.uint16)


def by_hand(part: torch.Tensor, num_words: int, level: int) -> list[int]:
    """What a packed part means, word by word."""
    blocks = num_blocks(2 * num_words)
    content = bytes(part[: packed_bytes(blocks, level)].tolist())
    codes, tops = blocks * BLOCK, blocks * BLOCK * 11 // 8
    listed = iter(content[tops + blocks :])
    plane = BLOCK // 8
    found: list[int] = []
    for number in range(blocks * BLOCK):
        block, place = divmod(number, BLOCK)
        bit, byte = 3 * (place // plane), codes + block * 3 * plane + place % plane
        three = sum(content[byte + one * plane] << 8 * one for one in range(3))
        code = three >> bit & 7
        exponent = next(listed) if code == ESCAPE else content[tops + block] - code & 0xFF
        rest = content[number]
        found.append((rest & 1) << 15 | exponent << 7 | rest >> 1)
    return found[:num_words]


@st.composite
def parts(draw: Any) -> Words:
    """Of a few blocks, the last one seldom whole, as caches have them or not at all so."""
    count = 8 * draw(st.integers(1, 3 * BLOCK // 8))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    spread = draw(st.sampled_from((0.0, 1e-38, 1e-3, 1.0, 1e38)))
    values = generator.standard_normal(count) * spread
    with np.errstate(over="ignore"):
        words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    share = draw(st.sampled_from((0.0, 0.01, 0.1)))
    chosen = generator.random(count) < share
    words[chosen] = generator.choice(np.array(SPECIAL, dtype=np.uint16), int(chosen.sum()))
    chosen = generator.random(count) < draw(st.sampled_from((0.0, 0.001, 0.02)))
    words[chosen] = generator.integers(0, 1 << 16, int(chosen.sum()), dtype=np.uint16)
    return words


@settings(max_examples=60, deadline=None)
@given(parts())
def test_all_words_come_back_and_mean_what_they_say(words: Words) -> None:
    part, level = packed(words)
    if level:
        assert (
            packed_bytes(num_blocks(words.nbytes), level) < num_blocks(words.nbytes) * BLOCK_BYTES
        )
        assert unpacked(part, words.nbytes, level).tolist() == words.tolist()
        assert by_hand(part, len(words), level) == words.tolist()


def test_every_word_there_is_comes_back() -> None:
    """A few among others, for all at once would not become shorter."""
    every = np.arange(1 << 16, dtype=np.uint16)
    words = np.full((1 << 16) * 16, 0x3F80, dtype=np.uint16)
    words[::16] = every
    part, level = packed(words)
    assert level > 0
    assert unpacked(part, words.nbytes, level).tolist() == words.tolist()


@pytest.mark.parametrize("word", SPECIAL)
def test_words_that_are_all_equal_take_eleven_bits(word: int) -> None:
    words = np.full(4 * BLOCK, word, dtype=np.uint16)
    part, level = packed(words)
    assert level == 1
    assert packed_bytes(4, level) < 0.7 * words.nbytes
    assert unpacked(part, words.nbytes, level).tolist() == words.tolist()


def test_normal_numbers_become_shorter_by_nearly_a_third() -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1)).bfloat16()
    words = values.view(torch.int16).numpy().view(np.uint16)
    _, level = packed(words)
    assert 1.425 < words.nbytes / packed_bytes(num_blocks(words.nbytes), level) < 16 / 11


def test_what_does_not_become_shorter_is_refused() -> None:
    words = np.random.default_rng(1).integers(0, 1 << 16, 4 * BLOCK, dtype=np.uint16)
    assert packed(words)[1] == 0


def test_every_level_is_shorter_and_one_more_escape_takes_the_next() -> None:
    assert max_level(1) == MAX_LEVEL
    assert packed_bytes(3, MAX_LEVEL) < 3 * BLOCK_BYTES
    for count, expected in ((0, 1), (4, 1), (5, 2), (252, 63), (253, 0)):
        words = np.full(BLOCK, 0x3F80, dtype=np.uint16)
        words[1 : 1 + 2 * count : 2] = 0  # seldom enough that the top stays
        assert packed(words)[1] == expected, count


@pytest.mark.parametrize("level", [-1, 0, MAX_LEVEL + 1, 1 << 40])
def test_no_level_of_others_is_taken(level: int) -> None:
    target = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="expected levels 1 to 63"):
        list(decode(torch.zeros(BLOCK_BYTES, dtype=torch.uint8), target, BLOCK_BYTES, level))
    assert not target.any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 3), st.sampled_from((1, 7, MAX_LEVEL)))
def test_nothing_that_a_peer_sends_is_written_elsewhere(seed: int, blocks: int, level: int) -> None:
    """More escapes than are listed, as random codes have them, are refused."""
    generator = torch.Generator().manual_seed(seed)
    part = torch.randint(0, 256, (packed_bytes(blocks, level),), generator=generator)
    around = torch.full(((blocks + 2) * BLOCK_BYTES,), 0xC3, dtype=torch.uint8)
    target = around[BLOCK_BYTES : (blocks + 1) * BLOCK_BYTES]
    with contextlib.suppress(ProtocolError):
        list(decode(part.to(torch.uint8), target, blocks * BLOCK_BYTES, level))
    assert bool((around[:BLOCK_BYTES] == 0xC3).all())
    assert bool((around[-BLOCK_BYTES:] == 0xC3).all())


def test_one_escape_too_many_is_refused() -> None:
    part, level = packed(np.full(BLOCK, 0x3F80, dtype=np.uint16))
    for count in (exponents.ROOM, exponents.ROOM + 1):
        part[BLOCK : BLOCK + count] |= ESCAPE
        if count == exponents.ROOM:
            unpacked(part, BLOCK_BYTES, level)
            continue
        with pytest.raises(ProtocolError, match="more escapes than it lists"):
            unpacked(part, BLOCK_BYTES, level)
