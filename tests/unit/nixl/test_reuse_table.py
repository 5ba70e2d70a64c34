"""What is on offer, and that a block's generation changes when it no longer is."""

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_commext.nixl.reuse import offers
from vllm_commext.nixl.reuse.offers import (
    GenerationTable,
    Names,
    Offers,
    OfferTable,
    num_complete,
    open_generations,
)

NUM_BLOCKS = 8


def worker_tables(count: int = 2) -> list[np.ndarray]:
    return [np.zeros(NUM_BLOCKS, dtype=np.uint64) for _ in range(count)]


def name(number: int) -> bytes:
    return bytes([number]) * 32


def test_a_run_ends_at_the_first_block_that_is_not_there() -> None:
    table = OfferTable(made := worker_tables())
    table.offer([name(1), name(2), name(3)], [5, 2, 7])
    run = table.find([name(1), name(2), name(9), name(3)])
    assert run.block_ids == [5, 2]
    assert run.generations == [int(made[0][5]), int(made[0][2])]
    assert table.find([name(9), name(1)]).block_ids == []


def test_a_dropped_block_is_gone_and_its_generation_is_another_on_every_worker() -> None:
    table = OfferTable(made := worker_tables())
    table.offer([name(1), name(2)], [5, 2])
    before = [one.copy() for one in made]
    table.drop(2)
    assert table.find([name(1), name(2)]).block_ids == [5]
    for kept, old in zip(made, before, strict=True):
        assert [place for place in range(NUM_BLOCKS) if kept[place] != old[place]] == [2]
    assert np.array_equal(made[0], made[1])


def test_of_two_blocks_with_the_same_the_last_is_found() -> None:
    table = OfferTable(worker_tables())
    table.offer([name(1)], [5])
    table.offer([name(1)], [6])
    table.drop(5)
    assert table.find([name(1)]).block_ids == [6]
    table.drop(6)
    assert table.find([name(1)]).block_ids == []
    assert len(table) == 0


def test_after_a_clear_nothing_is_found_and_nothing_read_before_counts() -> None:
    table = OfferTable(made := worker_tables())
    table.offer([name(1)], [5])
    before = made[0].copy()
    table.clear()
    assert table.find([name(1)]).block_ids == []
    assert not (made[0] == before).any()


def test_two_starts_begin_with_other_generations() -> None:
    found = set[int]()
    for _ in range(4):
        OfferTable(made := worker_tables(1))
        found.add(int(made[0][0]))
    assert len(found) == 4


def test_random_offers_and_drops_against_a_plain_model() -> None:
    """The model keeps what each block holds; a generation counts how often a block was dropped."""
    dice = random.Random(7)
    table = OfferTable(made := worker_tables())
    first = int(made[0][0])
    holds: dict[int, bytes] = {}
    drops = [0] * NUM_BLOCKS
    for _ in range(3000):
        block = dice.randrange(NUM_BLOCKS)
        if dice.random() < 0.5:
            if block not in holds:
                holds[block] = name(dice.randrange(12))
                table.offer([holds[block]], [block])
        else:
            table.drop(block)
            holds.pop(block, None)
            drops[block] += 1
        one = name(dice.randrange(12))
        run = table.find([one])
        for found, generation in zip(run.block_ids, run.generations, strict=True):
            assert holds[found] == one
            assert generation == first + drops[found]


def test_the_scheduler_writes_where_the_worker_reads() -> None:
    table = GenerationTable(NUM_BLOCKS, 4)
    OfferTable([opened := open_generations(table.offer)]).drop(3)
    assert np.array_equal(opened, table.generations)
    assert table.generations[3] == table.generations[2] + np.uint64(1)
    table.close()
    assert table.generations[3] == opened[3]


def test_another_process_writes_there_too() -> None:
    table = GenerationTable(NUM_BLOCKS, 4)
    code = (
        "from vllm_commext.anonymous_memory import Offer\n"
        "from vllm_commext.nixl.reuse.offers import open_generations\n"
        "from vllm_commext.nixl.reuse.offers import OfferTable\n"
        f"OfferTable([open_generations({table.offer!r})]).drop(5)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert table.generations[5] == table.generations[4] + np.uint64(1)
    assert table.generations[4] != 0


@pytest.mark.parametrize(
    ("num_output", "num_preemptions", "num_computed", "expected"),
    [
        *((0, 0, 20, 0), (1, 0, 20, 20), (1, 0, 21, 20), (1, 0, 25, 20), (1, 0, 7, 7)),
        *((5, 1, 20, 0), (5, 3, 20, 0)),
    ],
)
def test_what_is_complete_of_a_request_that_runs(
    num_output: int, num_preemptions: int, num_computed: int, expected: int
) -> None:
    """Of 21 tokens: nothing of a prompt before its first token, nor after a preemption."""
    request = SimpleNamespace(
        num_output_tokens=num_output,
        num_preemptions=num_preemptions,
        num_computed_tokens=num_computed,
        num_tokens=21,
    )
    assert num_complete(request) == expected  # pyright: ignore


BLOCK = 4


class Engine:
    """Requests that run, with as many blocks as they have tokens for, and a pool that is told."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.watched: dict[int, Any] = {}

    def add(self, name: str, tokens: list[int]) -> Any:
        first = 100 * len(self.requests)
        blocks = [SimpleNamespace(block_id=first + n) for n in range(len(tokens) // BLOCK + 9)]
        request = SimpleNamespace(
            request_id=name,
            all_token_ids=tokens,
            num_output_tokens=1,
            num_preemptions=0,
            num_computed_tokens=len(tokens),
            num_tokens=len(tokens),
            blocks=blocks,
        )
        self.requests.append(request)
        return request

    def __iter__(self) -> Any:
        return iter(self.requests)

    def blocks_of(self, request: Any) -> Any:
        return request.blocks

    def touch(self, blocks: Any) -> None:
        """As a pool does."""

    def unpin_blocks(self, blocks: Any, note: Any) -> None:
        self.watched |= {one.block_id: note for one in blocks}


def test_what_is_on_offer_grows_with_each_block_by_no_more_than_a_step_may_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brute force: the names of all that is complete; each block is named once."""
    named = list[int]()
    chain = offers.chain

    def counted(last: bytes, tokens: list[int], size: int) -> list[bytes]:
        named.append(len(tokens) // size)
        return chain(last, tokens, size)

    monkeypatch.setattr(offers, "MAX_NAMED", 5)
    monkeypatch.setattr(Names, "root_of", lambda self, request: request.request_id.encode())
    engine, table = Engine(), OfferTable([np.zeros(1000, dtype=np.uint64)])
    side = Offers(Names(str, BLOCK), table, engine)
    first, second = engine.add("a", list(range(70))), engine.add("b", list(range(30)))
    expected = {
        one.request_id: chain(one.request_id.encode(), one.all_token_ids, BLOCK)
        for one in engine.requests
    }
    monkeypatch.setattr(offers, "chain", counted)
    for step in range(1, 6):
        side.add_running(engine)
        assert len(table) == min(5 * step, 17 + 7)
    for one, count in ((first, 17), (second, 7)):
        found = table.find(expected[one.request_id]).block_ids
        assert found == [block.block_id for block in one.blocks[:count]]
    for number in range(8):
        first.all_token_ids = [*first.all_token_ids, number]
        first.num_tokens = first.num_computed_tokens = len(first.all_token_ids)
        side.add_running(engine)
        assert len(table) == 7 + (first.num_tokens - 1) // BLOCK
    assert (max(named), sum(named)) == (5, len(table))
    assert set(engine.watched) == set(table._hash_of)
    engine.watched[0](first.blocks[0])
    assert table.find(expected["a"]).block_ids == []
    side.clear(engine)
    first.num_tokens = first.num_computed_tokens = 78
    side.add_running(engine)
    assert len(table) == 0
