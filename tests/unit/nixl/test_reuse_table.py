"""What is on offer, and that a block's generation changes when it no longer is."""

import random
import subprocess
import sys
from collections import Counter
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from vllm_commext.nixl import reuse as offers
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.prefill.fence import GenerationTable
from vllm_commext.nixl.reuse import Names, Offers, OfferTable, num_complete

NUM_BLOCKS = 8


def worker_tables(count: int = 2) -> list[np.ndarray]:
    return [np.zeros(NUM_BLOCKS, dtype=np.uint64) for _ in range(count)]


def name(number: int) -> bytes:
    return bytes([number]) * 32


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
    first = made[0][0]
    holds: dict[int, bytes] = {}
    last: dict[bytes, int] = {}  # of blocks that hold the same, the one offered last is found
    drops = np.zeros(NUM_BLOCKS, dtype=np.uint64)
    for _ in range(3000):
        block = dice.randrange(NUM_BLOCKS)
        if dice.random() < 0.5:
            if block not in holds:
                holds[block] = name(dice.randrange(12))
                last[holds[block]] = block
                table.offer([holds[block]], [block])
        elif dice.random() < 0.02:
            table.clear()
            holds.clear()
            drops += np.uint64(1)
        else:
            table.drop(block)
            holds.pop(block, None)
            drops[block] += np.uint64(1)
        asked = [name(dice.randrange(12)) for _ in range(3)]
        expected = list(takewhile(lambda one: one in last and holds.get(last[one]) == one, asked))
        run = table.find(asked)
        assert run.block_ids == [last[one] for one in expected]
        assert run.generations == [int(first + drops[found]) for found in run.block_ids]
        for kept in made:
            assert np.array_equal(kept, first + drops)
        assert len(table) == len(holds)


def test_another_process_writes_there_too() -> None:
    table = GenerationTable(NUM_BLOCKS, 4)
    code = (
        "from vllm_commext.anonymous_memory import Offer\n"
        "from vllm_commext.nixl.prefill.fence import open_generations\n"
        "from vllm_commext.nixl.reuse import OfferTable\n"
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

    def add(self, name: str, tokens: list[int], num_blocks: int = 100) -> Any:
        first = num_blocks * len(self.requests)
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

    def blocks_of(self, request_id: str) -> Any:
        (blocks,) = (one.blocks for one in self.requests if one.request_id == request_id)
        return SimpleNamespace(blocks=(blocks,))

    def touch(self, blocks: Any) -> None:
        """As a pool does."""

    def unpin_blocks(self, blocks: Any, note: Any) -> None:
        self.watched |= {one.block_id: note for one in blocks}


def test_questions_cost_a_step_nothing_and_their_lookups_hold_it_up_for_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 requests of 4,000 tokens: a step calls as much as without questions, a few functions each,
    and hashes what is new alone."""
    engine, table = Engine(), OfferTable([np.zeros(64 * 1100, dtype=np.uint64)])
    side = Offers(Names(str, BLOCK, Identity()), table, engine)
    for number in range(64):
        engine.add(f"{number}", [number] * 4000, 1100)
    with monkeypatch.context() as patched:
        patched.setattr(Names, "root_of", lambda self, request: request.request_id.encode())
        while (named := len(table)) < 64 * 999:
            side.add_running(engine.requests, engine.blocks_of)
            assert 0 < len(table) - named <= offers.MAX_NAMED
    lock, calls = MagicMock(wraps=table._lock), Counter[str]()
    lock.__enter__.side_effect = table._lock.acquire
    lock.__exit__.side_effect = lambda *_: table._lock.release()
    monkeypatch.setattr(table, "_lock", lock)
    names = offers.chain(b"7", [7] * 4000, BLOCK)
    for _ in range(256):
        assert len(table.find(names).block_ids) == 999
    assert lock.__enter__.call_count == 256 * -(-len(names) // offers.MAX_FOUND)
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    side.add_running(engine.requests, engine.blocks_of)
    sys.setprofile(None)
    assert calls["call"] <= 64 * 4
    assert calls["c_call"] <= 64 * 8


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
    side = Offers(Names(str, BLOCK, Identity()), table, engine)
    first, second = engine.add("a", list(range(70))), engine.add("b", list(range(30)))
    expected = {
        one.request_id: chain(one.request_id.encode(), one.all_token_ids, BLOCK)
        for one in engine.requests
    }
    monkeypatch.setattr(offers, "chain", counted)
    for step in range(1, 6):
        side.add_running(engine.requests, engine.blocks_of)
        assert len(table) == min(5 * step, 17 + 7)
    for one, count in ((first, 17), (second, 7)):
        found = table.find(expected[one.request_id]).block_ids
        assert found == [block.block_id for block in one.blocks[:count]]
    for number in range(8):
        first.all_token_ids = [*first.all_token_ids, number]
        first.num_tokens = first.num_computed_tokens = len(first.all_token_ids)
        side.add_running(engine.requests, engine.blocks_of)
        assert len(table) == 7 + (first.num_tokens - 1) // BLOCK
    assert (max(named), sum(named)) == (5, len(table))
    assert set(engine.watched) == set(table._hash_of)
    engine.watched[0](first.blocks[0])
    assert table.find(expected["a"]).block_ids == []
    side.clear(engine.requests)
    first.num_tokens = first.num_computed_tokens = 78
    side.add_running(engine.requests, engine.blocks_of)
    assert len(table) == 0
