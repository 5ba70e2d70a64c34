"""Gathered reads between real agents: what is packed, read and unpacked is every byte that reads in
pieces bring, and whatever goes wrong, the pieces are read."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.cpu.nixl_agents.gathered import (
    LONG_SECONDS,
    NUM_LAYERS,
    SLOTS,
    copy_block,
    gather_everything,
    hybrid_layout,
    stride_of,
)
from tests.cpu.nixl_agents.harness import (
    BLOCK_BYTES,
    HOST,
    STREAM,
    expected_after,
    load_of,
    same,
    wait_until,
)
from tests.cpu.nixl_agents.ranks import MODEL_HEADS, PeerProcess, Ranks, expected_heads
from tests.cpu.nixl_agents.streams import Decode, Prefill, check_chunk_by_chunk
from vllm_commext.nixl.gathered import packer, read, reader
from vllm_commext.nixl.gathered.slots import digest_of
from vllm_commext.nixl.geometry.plan import Blocks, plan_read
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.prefill.fence import KEY_BYTES, FenceSlots
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.requests import Hold, Load
from vllm_commext.nixl.transfer_thread import GiveUp
from vllm_commext.nixl.transport.agent import DONE
from vllm_commext.nixl.wire import messages as wire

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def everything(monkeypatch: Patch) -> None:
    gather_everything(monkeypatch)


class Pair:
    """A prefill worker that packs, and a decode worker that has it pack."""

    def __init__(
        self, make_engine: MakeEngine, prefill: dict[str, Any] | None = None, **decode: Any
    ) -> None:
        self.prefill = make_engine("p", seed=1, serve=True, **{**SLOTS, **(prefill or {})})
        self.decode = make_engine("d", seed=2, **{**SLOTS, **decode})
        self.slots = FenceSlots(bytes(KEY_BYTES), 8)
        self.prefill.tables.fences.arm(bytes(KEY_BYTES))

    def remote(self, name: str, blocks: list[int], lease_seconds: float = 600.0) -> Any:
        """A finished prefill, which is held."""
        slot, nonce = self.slots.take() or (-1, 0)
        hold = Hold(name, lease_seconds, slot, nonce, block_ids=tuple(blocks))
        self.prefill.thread.submit(hold)
        return self.prefill.remote(name, blocks, fence_slot=slot, fence_nonce=nonce)

    def load(self, name: str, own: list[int], theirs: list[int]) -> int:
        """Load blocks, all bytes as they should be; how many of them were gathered."""
        expected = expected_after(
            self.decode.memory, self.prefill.memory, list(zip(own, theirs, strict=True))
        )
        before = self.decode.recorded["gathered_bytes"]
        self.decode.load(load_of(name, self.remote(f"p-{name}", theirs), own))
        assert self.decode.outcomes.failed == set()
        assert same(self.decode.memory, expected)
        return self.decode.recorded["gathered_bytes"] - before

    @property
    def packer(self) -> Any:
        return self.prefill.thread._packer

    @property
    def words(self) -> list[int]:
        """What the prefill worker says of its slots."""
        return self.prefill.gathering.words[0].tolist()

    def wait_at_rest(self) -> None:
        """Nothing is packed any more, and no slot is in use on either side."""
        wait_until(lambda: not len(self.packer), "the tickets to end")
        assert not any(self.words)
        incoming = self.decode.gathering._incoming
        assert sorted(incoming._free) == list(range(incoming.place.num_slots))


@pytest.fixture
def pair(make_engine: MakeEngine) -> Pair:
    return Pair(make_engine)


OWN, THEIRS = random.Random(1).sample(range(24), 12), random.Random(2).sample(range(24), 12)
NUM_BYTES = 3 * 12 * BLOCK_BYTES


def test_every_byte_goes_through_slots_and_each_part_is_one_descriptor(pair: Pair) -> None:
    assert pair.load("r", OWN, THEIRS) == NUM_BYTES == pair.decode.recorded["bytes"]
    assert pair.decode.recorded["descriptors"] == 36
    assert pair.decode.recorded["merged_descriptors"] == 8  # parts of five pieces
    pair.prefill.wait(lambda: "p-r" in pair.prefill.collect().sent)
    pair.wait_at_rest()


@pytest.mark.parametrize("slots", [(2, 2), (5, 2), (2, 5), (4, 3)])
def test_loads_side_by_side_share_the_slots(make_engine: MakeEngine, slots: Any) -> None:
    """As many as each side has."""
    pair = Pair(make_engine, {"gather_slots": slots[0]}, gather_slots=slots[1])
    expected, loads = pair.decode.memory, []
    for number in range(6):
        own, theirs = OWN[2 * number : 2 * number + 2], THEIRS[2 * number : 2 * number + 2]
        expected = expected_after(expected, pair.prefill.memory, [*zip(own, theirs, strict=True)])
        loads.append(load_of(f"r{number}", pair.remote(f"p{number}", theirs), own))
    pair.decode.load(*loads)
    assert same(pair.decode.memory, expected)
    assert pair.decode.recorded["gathered_bytes"] == pair.decode.recorded["bytes"] == NUM_BYTES
    pair.wait_at_rest()


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(2, 1), (1, 2), (4, 2)])
def test_every_head_comes_from_the_rank_that_holds_it(
    make_engine: MakeEngine, prefill_size: int, decode_size: int
) -> None:
    with Ranks("p", prefill_size, **SLOTS) as prefill:
        prefill.hold("x", slot=5, block_ids=tuple(THEIRS))
        remote = prefill.remote("x", THEIRS, fence_slot=5)
        for index in range(decode_size):
            rank = Rank(decode_size, index)
            decode = make_engine("d", seed=50 + index, num_heads=MODEL_HEADS, rank=rank, **SLOTS)
            expected = expected_heads(decode, prefill, list(zip(OWN, THEIRS, strict=True)))
            decode.load(load_of("r", remote, OWN))
            assert decode.outcomes.failed == set()
            assert same(decode.memory, expected)
            assert decode.recorded["gathered_bytes"] == decode.recorded["bytes"] > 0


def test_a_hybrid_between_unequal_sizes(make_engine: MakeEngine) -> None:
    """States in pieces of several lengths, beside attention."""
    num_blocks = 24
    sources = [
        make_engine(
            "p",
            seed=10 + index,
            num_layers=NUM_LAYERS,
            num_blocks=num_blocks,
            stride_bytes=max(stride_of(2, layer) for layer in range(NUM_LAYERS)),
            rank=Rank(2, index),
            layout=hybrid_layout(2, index, num_blocks),
            **SLOTS,
        )
        for index in range(2)
    ]
    decode = make_engine(
        "d",
        seed=2,
        num_layers=NUM_LAYERS,
        num_blocks=num_blocks,
        stride_bytes=max(stride_of(1, layer) for layer in range(NUM_LAYERS)),
        layout=hybrid_layout(1, 0, num_blocks),
        **SLOTS,
    )
    first = sources[0]
    first.server = SideChannelServer(
        *("p", first.incarnation, HOST, first.port),
        {index: one.description for index, one in enumerate(sources)},
    )
    attention, state = ([9, 4, 11, 2], [3, 8, 0, 7]), (17, 20)
    for one in sources:
        one.thread.submit(Hold("x", 600.0, 5, 0, block_ids=(*attention[1], state[1])))
    expected = [row.copy() for row in decode.memory]
    for layer in range(NUM_LAYERS):
        pairs = zip(*attention, strict=True) if layer < 2 else [state]
        for own, theirs in pairs:
            copy_block(expected, [one.memory for one in sources], layer, own, theirs)
    block_ids = (tuple(attention[1]), (state[1],))
    remote = replace(first.remote("x", attention[1], fence_slot=5), block_ids=block_ids)
    blocks = (Blocks(0, attention[0]), Blocks(0, [state[0]]))
    decode.load(Load("r", remote, blocks, 64))
    assert decode.outcomes.failed == set()
    assert same(decode.memory, expected)
    assert decode.recorded["gathered_bytes"] == decode.recorded["bytes"] > 0


@pytest.fixture
def streamed(make_engine: MakeEngine) -> Iterator[tuple[Prefill, Decode]]:
    """A prompt's two sides, with gathered reads."""
    prefill = Prefill(lambda name, **settings: make_engine(name, **{**SLOTS, **settings}))
    decode = Decode(make_engine, prefill.engine.port, **SLOTS)
    yield prefill, decode
    decode.close()


def test_chunks_are_packed_while_the_prompt_is_computed(
    streamed: tuple[Prefill, Decode],
) -> None:
    check_chunk_by_chunk(*streamed, "gathered_bytes")


def test_a_prompt_that_is_computed_makes_its_worker_listen(
    streamed: tuple[Prefill, Decode],
) -> None:
    """Nothing is held of it yet: without its row the worker would look once a second."""
    prefill, _ = streamed
    thread = prefill.engine.thread
    assert thread._wait_at_rest() > packer.WAIT_SECONDS
    prefill.add("r", 1)
    prefill.compute("r", 0)
    assert thread._wait_at_rest() <= packer.WAIT_SECONDS


def test_a_slow_look_is_not_taken_for_a_silent_peer(pair: Pair, monkeypatch: Patch) -> None:
    """Nor is whatever else keeps this worker's thread from looking."""
    monkeypatch.setattr(read, "PATIENCE_SECONDS", 0.1)
    take, looks = reader.Words.take, []

    def slow(words: Any) -> Any:
        looks.append(time.monotonic())
        if looks[-1] - looks[0] < 0.5:
            return None
        monkeypatch.setattr(read, "PATIENCE_SECONDS", LONG_SECONDS)
        return take(words)

    monkeypatch.setattr(reader.Words, "take", slow)
    assert pair.load("r", OWN, THEIRS) == NUM_BYTES


def test_a_look_that_fails_has_the_pieces_read(
    pair: Pair, monkeypatch: Patch, log_lines: Lines
) -> None:
    monkeypatch.setattr(reader, "AVOID_SECONDS", 0.0)
    free = len(pair.decode.gathering.table._free)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "DONE", "what it should be")
        assert pair.load("r", OWN, THEIRS) == 0
    assert [one for one in log_lines.messages if one.endswith("goes on in pieces: DONE")]
    assert pair.load("again", OWN, THEIRS) == NUM_BYTES
    assert len(pair.decode.gathering.table._free) == free
    pair.wait_at_rest()


def test_a_part_is_offered_before_the_next_one_is_begun(pair: Pair, monkeypatch: Patch) -> None:
    pack, offered = packer.Packer._pack, []

    def noted(one: Any, *args: Any) -> Any:
        offered.append(sum(word > 0 for word in pair.words))
        return pack(one, *args)

    monkeypatch.setattr(packer.Packer, "_pack", noted)
    stranger = Stranger(pair)
    stranger.ask([[0], [1]])
    wait_until(lambda: sum(word > 0 for word in pair.words) == 2, "both slots to be packed")
    assert offered == [0, 1]


def test_a_copy_that_fails_ends_the_ticket_and_no_slot_is_lost(
    pair: Pair, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(read, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(reader, "AVOID_SECONDS", 0.0)
    states = ["a failure"]
    monkeypatch.setattr(
        pair.prefill.gathering.copies, "state", lambda _: states.pop() if states else DONE
    )
    assert pair.load("r", OWN, THEIRS) == 0
    assert not states
    assert all(slot.is_free for slot in pair.packer._slots)
    monkeypatch.setattr(read, "PATIENCE_SECONDS", LONG_SECONDS)
    assert pair.load("again", OWN, THEIRS) == NUM_BYTES
    pair.wait_at_rest()


def at_read(patch: Patch, step: Callable[[int], None], number: int = 0) -> None:
    """Do something, given the prefill worker's slot, just before the first slot is read, or one
    that is read later."""
    make_read, called = reader.GatheredReader.make_read, []

    def make(self: Any, theirs: int, own: int, num_bytes: int) -> Any:
        called.append(theirs)
        if len(called) == number + 1:
            step(theirs)
        return make_read(self, theirs, own, num_bytes)

    patch.setattr(reader.GatheredReader, "make_read", make)


@pytest.mark.parametrize("number", [0, 7])
def test_a_slot_that_was_used_again_is_noticed(
    pair: Pair, monkeypatch: Patch, log_lines: Lines, number: int
) -> None:
    """Also the last one, and where a look takes so long that it has been unpacked by then."""
    unpack, unpacked = read.GatheredRead._unpack, []
    take, numbers = reader.Words.take, itertools.count()

    def noted(one: Any, part: Any) -> None:
        if not one._failure:
            unpacked.append(part.pieces.start // 5)
        unpack(one, part)

    monkeypatch.setattr(read.GatheredRead, "_unpack", noted)
    monkeypatch.setattr(reader.Words, "take", lambda one: next(numbers) % 2 and take(one) or None)

    def use_again(slot: int) -> None:
        pair.prefill.gathering.words[0, slot] = 0
        pair.prefill.gathering.slot(pair.packer._place, slot).fill_(255)

    at_read(monkeypatch, use_again, number)
    assert pair.load("r", OWN, THEIRS) < NUM_BYTES
    assert number in unpacked
    assert [one for one in log_lines.messages if "used again before it was read" in one]
    pair.wait_at_rest()
    assert pair.load("again", OWN, THEIRS) == NUM_BYTES


def test_a_lease_that_ends_meanwhile_is_noticed(pair: Pair, monkeypatch: Patch) -> None:
    """Its blocks are somebody else's by then: the fence, read after all of it, says so."""
    monkeypatch.setattr(read, "PATIENCE_SECONDS", 0.2)
    remote = pair.remote("x", THEIRS)

    def end(_: int) -> None:
        pair.prefill.thread._lease_manager.release("x")
        for row in pair.prefill.memory:
            row[:] = 255

    at_read(monkeypatch, end)
    pair.decode.load(load_of("r", remote, OWN))
    assert pair.decode.outcomes.failed == {"r"}
    assert pair.decode.recorded["failures"] == {"expired": 1}
    pair.wait_at_rest()


def test_without_a_free_slot_the_pieces_are_read(pair: Pair, monkeypatch: Patch) -> None:
    """For as long as somebody takes nothing of what was packed; then that is forgotten."""
    monkeypatch.setattr(read, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(reader, "AVOID_SECONDS", 0.0)
    monkeypatch.setattr(packer, "SILENT_SECONDS", 3.0)
    busy = [SimpleNamespace(is_free=False, ticket=0, part=0, posting=None) for _ in range(2)]
    slots, pair.packer._slots = pair.packer._slots, busy
    assert pair.load("r", OWN, THEIRS) == 0
    pair.packer._slots = slots
    monkeypatch.setattr(read, "PATIENCE_SECONDS", 60.0)
    assert pair.load("later", OWN, THEIRS) == NUM_BYTES
    pair.wait_at_rest()


def test_a_reader_that_takes_nothing_is_forgotten(pair: Pair, monkeypatch: Patch) -> None:
    monkeypatch.setattr(packer, "SILENT_SECONDS", 0.3)
    stranger = Stranger(pair)
    stranger.ask([[0], [1], [2]])
    wait_until(lambda: sum(word > 0 for word in pair.words) == 2, "both slots to be packed")
    wait_until(lambda: not len(pair.packer), "the reader to be forgotten")
    assert not any(pair.words)
    assert pair.load("r", OWN, THEIRS) == NUM_BYTES


@pytest.mark.parametrize("side", ["p", "d"])
def test_where_one_side_has_it_not_the_pieces_are_read(make_engine: MakeEngine, side: str) -> None:
    off = {"gathered_reads": False}
    prefill = make_engine("p", seed=1, serve=True, **({**SLOTS, **off} if side == "p" else SLOTS))
    decode = make_engine("d", seed=2, **({**SLOTS, **off} if side == "d" else SLOTS))
    expected = expected_after(decode.memory, prefill.memory, [(7, 3), (1, 9)])
    decode.load(load_of("r", prefill.remote("x", [3, 9], fence_slot=5), [7, 1]))
    assert same(decode.memory, expected)
    assert decode.recorded["bytes"] > 0 == decode.recorded["gathered_bytes"]


class Stranger:
    """A reader that asks the pair's prefill worker for what a test makes up; block 3 is its."""

    def __init__(self, pair: Pair) -> None:
        self._agent = pair.decode.agent
        self._prefill = pair.prefill
        self._name = self._agent.add_peer(pair.prefill.agent.metadata())
        self._agent.connect(self._name)
        layout = pair.decode.layout
        plan = plan_read(layout, pair.prefill.layout, local_device=0, remote_device=0)
        self.digest, self._layout = digest_of(plan.remote_rows), msgspec.msgpack.encode(layout)
        self.remote = pair.remote("x", [0, 1, 2, 3])
        self.tell(wire.GatherPlan(digest=self.digest, layout=self._layout))

    def tell(self, message: Any) -> None:
        self._agent.notify(self._name, wire.encode(message))

    def ask(self, numbers: list[list[int]], **changes: Any) -> None:
        values: dict[str, Any] = {
            "ticket": 7,
            "plan": self.digest,
            "request_id": "x",
            "fence_slot": self.remote.fence_slot,
            "nonce": self.remote.fence_nonce,
            "row": -1,
            "compressed": False,
            "first": 0,
            "parts": [np.array(one, dtype="<i4").tobytes() for one in numbers],
        }
        self.tell(wire.GatherAsk(**{**values, **changes}))

    def plan(self, **changes: Any) -> None:
        values = {"digest": self.digest, "layout": self._layout}
        self.tell(wire.GatherPlan(**{**values, **changes}))


HOSTILE: dict[str, Callable[[Stranger], None]] = {
    "a block of others": lambda one: one.ask([[0, 4]]),
    "a descriptor of none": lambda one: one.ask([[1 << 30]]),
    "a negative one": lambda one: one.ask([[-1]]),
    "an empty part": lambda one: one.ask([[]]),
    "half a number": lambda one: one.ask([], parts=[b"abc"]),
    "more than a slot": lambda one: one.ask([[0, 1, 2, 3] * 3000]),
    "more pieces than a launch has": lambda one: one.ask([[0] * 9000]),
    "another nonce": lambda one: one.ask([[0]], nonce=1),
    "a slot of no fence": lambda one: one.ask([[0]], fence_slot=1 << 40),
    "a negative fence": lambda one: one.ask([[0]], fence_slot=-1),
    "a row of none": lambda one: one.ask([[0]], row=1 << 40),
    "a row of nobody": lambda one: one.ask([[0]], row=1),
    "too many parts": lambda one: one.ask([[0]] * 1025),
    "a part beyond": lambda one: one.ask([[0]] * 2, first=1023),
    "no ticket": lambda one: one.ask([[0]], ticket=0),
    "a long ticket": lambda one: one.ask([[0]], ticket=1 << 48),
    "no layout": lambda one: one.plan(layout=b"nothing"),
    "a plan of others": lambda one: one.plan(digest=bytes(32)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_nobody_should_ask_for_is_refused(
    pair: Pair, monkeypatch: Patch, log_lines: Lines, case: str
) -> None:
    if case == "more than a slot":  # so small are these pieces
        monkeypatch.setattr(packer, "MAX_PIECES", 1 << 14)
    stranger = Stranger(pair)
    HOSTILE[case](stranger)
    pair.prefill.wait(
        lambda: (
            bool(pair.prefill.collect()) and pair.prefill.recorded["unmatched_notifications"] > 0
        )
    )
    assert pair.prefill.recorded["unmatched_notifications"] == 1
    assert [line for line in log_lines.messages if "ignored a NIXL" in line or "refused" in line]
    wait_until(lambda: not len(pair.packer), "the ticket to be dropped")
    assert not any(pair.words)
    assert pair.load("r", OWN, THEIRS) == NUM_BYTES


def test_no_more_readers_than_there_is_room_for(pair: Pair, monkeypatch: Patch) -> None:
    monkeypatch.setattr(packer, "MAX_TICKETS", 2)
    stranger = Stranger(pair)
    for ticket in (1, 2, 3):
        stranger.ask([[0]] * 3, ticket=ticket)
    pair.prefill.wait(
        lambda: (
            bool(pair.prefill.collect()) and pair.prefill.recorded["unmatched_notifications"] > 0
        )
    )
    assert set(pair.packer._tickets) == {1, 2}


def test_a_worker_that_dies_in_the_midst_ends_the_load(
    make_engine: MakeEngine, monkeypatch: Patch
) -> None:
    decode = make_engine("d", seed=2, **SLOTS)
    with PeerProcess("p", seed=1, num_computed=8, whole=True, gathers=True) as prefill:
        at_read(monkeypatch, lambda _: prefill.kill())
        remote = replace(prefill.remote("x", [], **STREAM), block_ids=(), num_tokens=128)
        decode.load(load_of("r", remote, list(range(8))))
        assert decode.outcomes.failed == {"r"}
        assert set(decode.recorded["failures"]) <= {"transfer", "timeout"}
    assert sorted(decode.gathering._incoming._free) == [0, 1]


def test_a_worker_that_stands_still_is_late_and_every_slot_comes_back(
    make_engine: MakeEngine, monkeypatch: Patch
) -> None:
    decode = make_engine("d", seed=2, transfer_timeout=1.0, **SLOTS)
    with PeerProcess("p", seed=1, num_computed=8, gathers=True) as prefill:
        at_read(monkeypatch, lambda _: prefill.stop())
        remote = replace(prefill.remote("x", [], **STREAM), block_ids=(), num_tokens=128)
        decode.thread.submit(load_of("r", remote, list(range(8))))
        decode.wait(lambda: decode.collect().late == {"r"})
        decode.thread.submit(GiveUp("r"))
        decode.wait(lambda: "r" in decode.collect().failed)
        prefill.go_on()
        decode.wait(lambda: decode.collect().settled == {"r"})
    assert sorted(decode.gathering._incoming._free) == [0, 1]
