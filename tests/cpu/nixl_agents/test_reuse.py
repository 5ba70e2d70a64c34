"""Blocks that are kept for nobody: what was read counts where its generations still stand."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cpu.nixl_agents.harness import (
    BLOCK_BYTES,
    STRIDE_BYTES,
    assert_fails,
    expected_after,
    load_of,
    same,
    wait_until,
)
from vllm_commext.nixl.prefill.fence import open_generations
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.reuse import OfferTable
from vllm_commext.nixl.transfer_thread import GiveUp

NUM_OVERWRITES = 1000
MakeEngine = Callable[..., Any]


class Owner:
    """An engine with blocks on offer, and its scheduler side's table."""

    def __init__(self, make_engine: MakeEngine, **settings: Any) -> None:
        self.engine = make_engine("o", seed=1, serve=True, reuse_blocks=True, **settings)
        self.table = OfferTable([open_generations(self.engine.tables.generations.offer)])
        self.num_writes = 0

    def offer(self, block_ids: list[int]) -> list[bytes]:
        """Put blocks on offer, each under what it holds."""
        names = [_content(self.engine, block) for block in block_ids]
        self.table.offer(names, block_ids)
        return names

    def overwrite(self, block: int) -> None:
        """As vLLM's pool and worker do: the block is no longer on offer, then it is written to."""
        self.table.drop(block)
        self.num_writes += 1
        begin = block * STRIDE_BYTES
        for row in self.engine.memory:
            row[begin : begin + BLOCK_BYTES] += np.uint8(1 + self.num_writes % 255)

    def remote(self, name: str, names: list[bytes], **changes: Any) -> RemoteRequest:
        """What a look-up says of blocks with these names."""
        run = self.table.find(names)
        generations = tuple(run.generations)
        return self.engine.remote(name, run.block_ids, generations=generations, **changes)


@pytest.fixture
def owner(make_engine: MakeEngine) -> Owner:
    return Owner(make_engine)


@pytest.fixture
def reader(make_engine: MakeEngine) -> Any:
    return make_engine("d", seed=2, reuse_blocks=True)


def test_blocks_that_stay_are_read_and_nobody_is_told(owner: Owner, reader: Any) -> None:
    before = owner.engine.recorder.take()
    names = owner.offer([9, 2, 5])
    expected = expected_after(reader.memory, owner.engine.memory, [(0, 9), (4, 2), (1, 5)])
    reader.load(load_of("r", owner.remote("once", names), [0, 4, 1]))
    assert "r" not in reader.outcomes.failed
    assert same(reader.memory, expected)
    wait_until(lambda: not reader.thread._loader.uses, "the transfer to be forgotten")
    after = owner.engine.recorder.take() or {}
    assert not (before or {}).get("unmatched_notifications")
    assert not after.get("unmatched_notifications")
    assert not after.get("ignored_heartbeats")


@pytest.mark.parametrize("kind", ["no table there", "no table here"])
def test_what_cannot_be_proven_is_not_read(
    make_engine: MakeEngine, kind: str, log_lines: pytest.LogCaptureFixture
) -> None:
    other = make_engine("p", seed=1, serve=True, reuse_blocks=kind == "no table here")
    reader = make_engine("d", seed=2, reuse_blocks=kind == "no table there")
    remote = other.remote("once", [3, 1], generations=(0, 0))
    assert_fails(reader, load_of("r", remote, [0, 2]), "request", log_lines, "reuse_blocks")


@pytest.mark.parametrize("generations", [(1,), (1, 1, 1)])
def test_generations_that_are_not_one_a_block_are_refused(
    owner: Owner, reader: Any, generations: tuple[int, ...], log_lines: pytest.LogCaptureFixture
) -> None:
    remote = owner.engine.remote("once", [3, 1], generations=generations)
    assert_fails(reader, load_of("r", remote, [0, 2]), "request", log_lines, "generation for each")


def test_more_blocks_than_cells_wait_for_their_turn(owner: Owner, reader: Any) -> None:
    """Six loads of 20 blocks each, for 64 cells."""
    block_ids = list(range(1, 21))
    names = owner.offer(block_ids)
    loads = [load_of(f"r{n}", owner.remote(f"o{n}", names), range(20)) for n in range(6)]
    reader.load(*loads)
    assert not reader.outcomes.failed
    generations = reader.tables.generations.table
    wait_until(
        lambda: len(generations._free) == len(generations.cells), "the cells to be given back"
    )


def test_a_load_does_not_wait_for_cells_that_never_come_back(
    owner: Owner, make_engine: MakeEngine
) -> None:
    """A read from an engine that is stopped keeps its cells until NIXL reports its end."""
    reader = make_engine("d", seed=2, reuse_blocks=True, transfer_timeout=0.5)
    generations = reader.tables.generations.table
    kept = generations.take(len(generations.cells))
    remote = owner.remote("once", owner.offer([9, 2, 5]))
    reader.thread.submit(load_of("r", remote, [0, 4, 1]))
    reader.wait(lambda: "r" in reader.collect().late)
    reader.thread.submit(GiveUp("r"))
    reader.wait(lambda: "r" in reader.collect().settled)
    assert "r" in reader.outcomes.failed
    assert reader.recorded["failures"] == {"timeout": 1}
    generations.give_back(kept)
    reader.load(load_of("again", owner.remote("twice", owner.offer([9, 2, 5])), [0, 4, 1]))
    assert "again" not in reader.outcomes.failed


def test_a_thousand_overwrites_between_looking_up_and_reading(
    owner: Owner, reader: Any, log_lines: pytest.LogCaptureFixture
) -> None:
    """What counts as read is what was looked up, or the load has failed; both happen often.

    Blocks are used again at random times from another thread, some before and some during a read.
    """
    dice = random.Random(11)
    num_right = num_failed = 0
    while owner.num_writes < NUM_OVERWRITES:
        blocks = dice.sample(range(1, 24), 6)
        names = owner.offer(blocks)
        remote = owner.remote(f"o{owner.num_writes}", names)
        victims = [dice.randrange(1, 24) for _ in range(dice.randrange(6))]
        pauses = [dice.random() * 0.002 for _ in victims]
        load = load_of(f"r{num_right + num_failed}", remote, range(6))
        writer = threading.Thread(target=_overwrite, args=(owner, victims, pauses))
        writer.start()
        if dice.random() < 0.5:
            writer.join()
        reader.load(load)
        writer.join()
        if load.request_id in reader.outcomes.failed:
            num_failed += 1
        else:
            num_right += 1
            assert [_content(reader, block) for block in range(6)] == names
    assert reader.recorded["failures"] == {"expired": num_failed}
    assert min(num_right, num_failed) >= 50
    assert "used some of the blocks again" in log_lines.text


def test_the_same_without_generations_reads_wrong_bytes(owner: Owner, reader: Any) -> None:
    """What the test before would find, if nothing was proven."""
    names = owner.offer([9, 2, 5])
    remote = replace(owner.remote("once", names), generations=())
    owner.overwrite(2)
    reader.load(load_of("r", remote, [0, 1, 2]))
    assert "r" not in reader.outcomes.failed
    assert [_content(reader, block) for block in range(3)] != names


def _overwrite(owner: Owner, victims: list[int], pauses: list[float]) -> None:
    wait = threading.Event()
    for victim, pause in zip(victims, pauses, strict=True):
        wait.wait(pause)
        owner.overwrite(victim)


def _content(engine: Any, block: int) -> bytes:
    begin = block * STRIDE_BYTES
    return b"".join(row[begin : begin + BLOCK_BYTES].tobytes() for row in engine.memory)
