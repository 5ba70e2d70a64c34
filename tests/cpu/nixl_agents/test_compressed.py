"""Gathered reads of bfloat16 that are compressed on their way, between real agents: every byte
comes, fewer are moved, and what a peer says wrongly is read in pieces."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.cpu.nixl_agents.gathered import LONG_SECONDS, gather_everything
from tests.cpu.nixl_agents.harness import Bytes, load_of, same
from tests.cpu.nixl_agents.test_gathered import Pair
from vllm_commext.nixl.gathered import packer, read, reader
from vllm_commext.nixl.gathered.exponents import num_blocks, packed_bytes

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch

BLOCK_BYTES, BLOCKS = 32 << 10, list(range(8))
NUM_BYTES = 3 * len(BLOCKS) * BLOCK_BYTES
OWN = [5, 0, 7, 2, 1, 6, 3, 4]
CACHE = {"num_blocks": len(BLOCKS), "block_bytes": BLOCK_BYTES, "dtype": "bfloat16"}
ON = {"wire_compression": "lossless"}


@pytest.fixture(autouse=True)
def everything(monkeypatch: Patch) -> None:
    """In parts of at most three blocks; no read is too short."""
    gather_everything(monkeypatch, max_pieces=3)
    monkeypatch.setattr(read, "LONG_PATIENCE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(reader, "MIN_COMPRESSED_BYTES", NUM_BYTES // 8)


def fill(memory: Sequence[Bytes]) -> None:
    """With what looks like keys and values."""
    for number, row in enumerate(memory):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(len(row) // 2, generator=generator).bfloat16()
        row[:] = values.view(torch.uint8).numpy()


class LargeBlocks(Pair):
    """A pair whose blocks are as large as those of caches."""

    def load(self, name: str, own: list[int], theirs: list[int]) -> int:
        expected = expected_after(self, own, theirs)
        before = self.decode.recorded["gathered_bytes"]
        self.decode.load(load_of(name, self.remote(f"p-{name}", theirs), own))
        assert self.decode.outcomes.failed == set()
        assert same(self.decode.memory, expected)
        return self.decode.recorded["gathered_bytes"] - before


def blocks_of(row: Bytes) -> Bytes:
    return row.reshape(len(BLOCKS), -1)[:, :BLOCK_BYTES]


def expected_after(pair: Pair, own: list[int], theirs: list[int]) -> list[Bytes]:
    """The decode worker's memory when these blocks are loaded."""
    expected = [row.copy() for row in pair.decode.memory]
    for row, source in zip(expected, pair.prefill.memory, strict=True):
        blocks_of(row)[own] = blocks_of(source)[theirs]
    return expected


def make(
    make_engine: MakeEngine, prefill: dict[str, Any] | None = None, **decode: Any
) -> LargeBlocks:
    theirs = {**CACHE, **ON, **(prefill or {})}
    pair = LargeBlocks(make_engine, theirs, **{**CACHE, **ON, **decode})
    fill(pair.prefill.memory)
    return pair


@pytest.fixture
def moved(monkeypatch: Patch) -> list[int]:
    """Bytes of the slots that are read."""
    make_read, found = reader.GatheredReader.make_read, list[int]()

    def note(self: Any, theirs: int, own: int, num_bytes: int) -> Any:
        found.append(num_bytes)
        return make_read(self, theirs, own, num_bytes)

    monkeypatch.setattr(reader.GatheredReader, "make_read", note)
    return found


def test_all_bytes_come_and_a_quarter_of_them_is_not_moved(
    make_engine: MakeEngine, moved: list[int]
) -> None:
    pair = make(make_engine)
    assert pair.load("r", OWN, BLOCKS) == NUM_BYTES
    assert len(moved) >= NUM_BYTES // BLOCK_BYTES // 3
    assert sum(moved) == NUM_BYTES - pair.decode.recorded["saved_bytes"] < 0.75 * NUM_BYTES
    pair.wait_at_rest()
    assert not pair.prefill.gathering.scratch._is_taken
    assert not pair.decode.gathering.scratch._is_taken


def test_what_lies_in_the_slots_is_compressed(make_engine: MakeEngine, monkeypatch: Patch) -> None:
    """Zeros in it arrive as what they mean."""
    pair = make(make_engine)
    pack = packer.compress

    def zeros(*args: Any) -> Any:
        level = yield from pack(*args)
        blocks = num_blocks(int(args[2][-1]))
        args[4][: packed_bytes(blocks, level)] = 0
        return level

    monkeypatch.setattr(packer, "compress", zeros)
    remote = pair.remote("p", BLOCKS)
    pair.decode.load(load_of("r", remote, OWN))
    assert pair.decode.outcomes.failed == set()
    assert pair.decode.recorded["saved_bytes"] > 0
    for row in pair.decode.memory:
        assert not blocks_of(row).any()


def test_loads_side_by_side_share_the_scratch(make_engine: MakeEngine) -> None:
    pair = make(make_engine)
    expected, loads = expected_after(pair, OWN, BLOCKS), []
    for number in range(4):
        own, theirs = OWN[2 * number : 2 * number + 2], BLOCKS[2 * number : 2 * number + 2]
        loads.append(load_of(f"r{number}", pair.remote(f"p{number}", theirs), own))
    pair.decode.load(*loads)
    assert same(pair.decode.memory, expected)
    assert pair.decode.recorded["saved_bytes"] > 0.25 * NUM_BYTES
    pair.wait_at_rest()


def test_random_words_come_as_they_are(make_engine: MakeEngine, moved: list[int]) -> None:
    pair = make(make_engine)
    for row in pair.prefill.memory:
        row[:] = np.random.default_rng(1).integers(0, 256, len(row), dtype=np.uint8)
    assert pair.load("r", OWN, BLOCKS) == NUM_BYTES == sum(moved)
    assert pair.decode.recorded["saved_bytes"] == 0


@pytest.mark.parametrize(
    "case", ["off on P", "off on D", "another type", "a short read", "no gathered reads on P"]
)
def test_without_compression_all_comes_as_before(
    make_engine: MakeEngine, monkeypatch: Patch, log_lines: Lines, case: str
) -> None:
    off = {"wire_compression": "off"}
    prefill = {"off on P": off, "no gathered reads on P": {**off, "gathered_reads": False}}
    decode: dict[str, Any] = {"off on D": off, "another type": {"dtype": "float16"}}
    if case == "a short read":
        monkeypatch.setattr(reader, "MIN_COMPRESSED_BYTES", NUM_BYTES + 1)
    theirs = {**prefill.get(case, {}), **({"dtype": "float16"} if case == "another type" else {})}
    pair = make(make_engine, theirs, **decode.get(case, {}))
    is_gathered = case != "no gathered reads on P"
    assert pair.load("r", OWN, BLOCKS) == NUM_BYTES * is_gathered
    assert pair.decode.recorded["bytes"] == NUM_BYTES
    assert pair.decode.recorded["saved_bytes"] == 0
    said = [line for line in log_lines.messages if "wire_compression" in line]
    assert len(said) == (case in ("off on P", "no gathered reads on P"))


def at_each_word(patch: Patch, change: Callable[[int], int]) -> None:
    """Have the prefill worker say other levels than it should."""
    word_of = packer.word_of
    patch.setattr(
        packer, "word_of", lambda ticket, part, level: word_of(ticket, part, change(level))
    )


def test_a_level_that_none_is_longer_for_is_not_read(
    make_engine: MakeEngine, monkeypatch: Patch, log_lines: Lines, moved: list[int]
) -> None:
    """Here: of reads that were not to be compressed."""
    at_each_word(monkeypatch, lambda _: 1)
    pair = make(make_engine, wire_compression="off")
    assert pair.load("r", OWN, BLOCKS) == 0
    assert not moved
    assert any("has level 1" in line for line in log_lines.messages)
    pair.wait_at_rest()


def test_too_few_listed_escapes_are_noticed(
    make_engine: MakeEngine, monkeypatch: Patch, log_lines: Lines
) -> None:
    """As in any content that a peer makes up: the rest is read in pieces."""
    at_each_word(monkeypatch, lambda _: 1)
    pair = make(make_engine)
    assert pair.load("r", OWN, BLOCKS) < NUM_BYTES
    assert any("more escapes than it lists" in line for line in log_lines.messages)
    pair.wait_at_rest()
    assert not pair.decode.gathering.scratch._is_taken


def test_a_reader_is_not_forgotten_while_a_slot_takes_long(
    make_engine: MakeEngine, monkeypatch: Patch
) -> None:
    """As over a slow network: here what is read seems to be under way for a second and a half."""
    monkeypatch.setattr(packer, "SILENT_SECONDS", 1.0)
    pair = make(make_engine)
    look, begun = read.Posting.look, dict[int, float]()

    def late(self: Any) -> str | None:
        if threading.current_thread() is not pair.decode.thread._thread:
            return look(self)
        if time.monotonic() - begun.setdefault(id(self), time.monotonic()) < 1.5:
            return None
        return look(self)

    monkeypatch.setattr(read.Posting, "look", late)
    assert pair.load("r", OWN[:3], BLOCKS[:3]) == NUM_BYTES * 3 // len(BLOCKS)
