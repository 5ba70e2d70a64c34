"""Chunk streaming without a network: rows, tables, and the prefill engine's scheduler side."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.kit import stream_requests
from tests.kit.stream_requests import step
from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.engine_context import Streaming
from vllm_commext.nixl.geometry.layout import FULL, STATE, WINDOW, Group
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.prefill.fence import FenceSlots, FenceTable
from vllm_commext.nixl.prefill.prefill_state import PrefillState
from vllm_commext.nixl.requests import Chunk, Hold, Restart
from vllm_commext.nixl.stream import progress as rows
from vllm_commext.nixl.stream.producer import MAX_ENDED, Handover, StreamDirectory, StreamProducer
from vllm_commext.nixl.stream.progress import ENDED, Header, ProgressTable, Publisher, header_of
from vllm_commext.nixl.wire.messages import FoundStream

NONCES = st.integers(1, (1 << 64) - 1)
TOKENS = st.integers(0, (1 << 31) - 1)
BLOCK_IDS = st.integers(0, (1 << 32) - 1)
FENCE_KEY = bytes(32)


@given(NONCES, NONCES, TOKENS)
def test_a_mark_speaks_of_its_nonce_alone(nonce: int, other: int, num_tokens: int) -> None:
    mark = rows.mark_of(nonce, num_tokens)
    whole = mark | rows.WHOLE
    assert whole < 1 << 64
    assert rows.tokens_in(mark, nonce) == rows.tokens_in(whole, nonce) == num_tokens
    assert (rows.is_whole(mark, nonce), rows.is_whole(whole, nonce)) == (False, True)
    if (nonce - other) % (1 << 32):
        assert rows.tokens_in(mark, other) == 0
        assert not rows.is_whole(whole, other)


@given(NONCES, NONCES, st.lists(BLOCK_IDS), st.lists(BLOCK_IDS, min_size=1), st.lists(BLOCK_IDS))
def test_ids_are_known_up_to_the_first_entry_of_another_nonce(
    nonce: int, other: int, ids: list[int], others: list[int], more: list[int]
) -> None:
    assume((nonce - other) % (1 << 32))
    entries = [rows.entries_of(nonce, ids), rows.entries_of(other, others)]
    entries.append(rows.entries_of(nonce, more))
    assert rows.ids_in(np.concatenate(entries), nonce).tolist() == ids
    assert rows.ids_in(entries[0], nonce).tolist() == ids


GROUPS = st.lists(
    st.builds(Group, st.sampled_from([FULL, WINDOW, STATE]), st.integers(1, 50)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize(
    ("max_tokens", "num_rows"), [(100, 256), (1 << 17, 256), (1 << 20, 128), (10_000_000, 16)]
)
def test_engines_of_very_long_prompts_stream_fewer_at_a_time(
    max_tokens: int, num_rows: int
) -> None:
    streaming = Streaming(None, (Group(FULL, 16),), max_tokens, 32)
    pieces = streaming.pieces_per_row
    assert len(ProgressTable(pieces).headers) == num_rows
    producer = StreamProducer(FenceSlots(FENCE_KEY, 1), StreamDirectory(), streaming, Identity())
    states = [PrefillState(request(str(n), f"{n:032x}")) for n in range(num_rows + 1)]
    ways = [producer.add(state) for state in states]
    assert ways == [Handover.STREAMED] * num_rows + [Handover.NO_ROOM]


@given(GROUPS, st.integers(1, 5000))
def test_regions_hold_every_group_and_do_not_overlap(groups: list[Group], max_tokens: int) -> None:
    regions = rows.regions_of(groups, max_tokens)
    assert len(regions) == len(groups)
    end = 0
    for group, region in zip(groups, regions, strict=True):
        assert region.first == end
        end += region.num_pieces
        num_blocks = 1 if group.kind == STATE else -(-max_tokens // group.block_size)
        assert region.num_pieces * rows.PIECE_IDS >= num_blocks + (group.kind != FULL)
    firsts = [region.first for region in regions]
    assert rows.regions_at(firsts, end) == regions


@pytest.mark.parametrize("firsts", [[], [1], [0, 0], [0, 3, 2], [0, 7], [0, 8]])
def test_regions_that_do_not_lie_one_behind_the_other_are_refused(firsts: list[int]) -> None:
    with pytest.raises(ProtocolError, match="regions"):
        rows.regions_at(firsts, 7)


@given(st.integers(0, 50), st.integers(0, 500), st.integers(1, 500), st.integers(1, 64))
def test_chunks_grow_by_whole_steps_up_to_the_end(
    done_steps: int, ready: int, num_tokens: int, step: int
) -> None:
    done = min(done_steps * step, num_tokens)
    target = rows.next_chunk(done, ready, num_tokens, step)
    assert done <= target <= max(ready, done)
    assert target in (done, num_tokens) or (target % step == 0 and target < num_tokens)
    if ready - done >= step and done < num_tokens:
        assert target > done


def read(progress: ProgressTable, row: int) -> Header:
    return header_of(progress.headers[row])


def test_a_row_through_the_life_of_a_request() -> None:
    progress = ProgressTable(2, num_rows=3)
    progress.begin(1, 77)
    assert read(progress, 1) == Header(77, 77, 0)
    progress.publish(1, 77, ((0, (5, 9)),), 20)
    progress.publish(1, 77, ((2, (3,)),), 40)
    progress.begin(1, 77)
    assert read(progress, 1) == Header(77, 77, 40)
    assert rows.ids_in(progress.entries[1], 77).tolist() == [5, 9, 3]
    progress.restart(1, 88)
    assert read(progress, 1) == Header(77, 88, 0)
    progress.publish(1, 77, ((0, (1, 1, 1)),), 60)
    assert read(progress, 1) == Header(77, 88, 0)
    assert rows.ids_in(progress.entries[1], 77).tolist() == [5, 9, 3]
    progress.publish(1, 88, ((0, (4,)),), 10)
    assert read(progress, 1) == Header(77, 88, 10)
    progress.end(1)
    assert read(progress, 1) == Header(77, ENDED, 0)
    progress.begin(1, 99)
    assert read(progress, 1) == Header(99, 99, 0)
    assert not progress.headers[[0, 2]].any()


class Work:
    """A device's work that ends when a test says so."""

    def __init__(self) -> None:
        self.has_ended = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.has_ended


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """What a publisher has recorded on its device."""
    found: list[Work] = []

    def event() -> Work:
        found.append(Work())
        return found[-1]

    monkeypatch.setattr("vllm_commext.nixl.stream.progress.torch.Event", event)
    return found


def test_on_a_device_a_chunk_is_published_when_its_work_has_ended(made: list[Work]) -> None:
    progress, fences = ProgressTable(1), FenceTable()
    fences.arm(FENCE_KEY)
    publisher = Publisher(progress, fences, is_on_device=True)
    nonce = int(fences.nonces[5])
    publisher.launched([Chunk(2, nonce, ((0, (7,)),), 16, begins=True)])
    publisher.launched([Chunk(2, nonce, ((1, (6,)),), 32)])
    publisher.poll()
    assert (read(progress, 2), len(publisher)) == (Header(nonce, nonce, 0), 2)
    made[1].has_ended = True
    publisher.poll()
    assert read(progress, 2).num_tokens == 0
    made[0].has_ended = True
    publisher.poll()
    assert (read(progress, 2).num_tokens, len(publisher)) == (32, 0)
    publisher.launched([Chunk(2, nonce, ((2, (4,)),), 48)])
    publisher.prepare([], [Restart(2, 5, nonce)])
    made[2].has_ended = True
    publisher.poll()
    new = int(fences.nonces[5])
    assert new != nonce
    assert read(progress, 2) == Header(nonce, new, 0)


def request(name: str, key: str = "a" * 32, num_tokens: int = 40, **changes: Any) -> Any:
    return stream_requests.request(name, key, num_tokens, **changes)


class Side:
    def __init__(
        self, num_rows: int = 2, num_slots: int = 8, groups: Sequence[Group] = (Group(FULL, 16),)
    ) -> None:
        self.fences = FenceSlots(FENCE_KEY, num_slots)
        self.directory = StreamDirectory()
        streaming = Streaming(None, tuple(groups), 64, 32)
        self.producer = StreamProducer(self.fences, self.directory, streaming, Identity(), num_rows)
        self.states: dict[str, PrefillState] = {}

    def add(self, one: Any, **how: Any) -> Handover:
        state = self.states[one.request_id] = PrefillState(one)
        return self.producer.add(state, **how)

    def take_step(self, made: Any) -> Any:
        return self.producer.take_step(self.states, made)

    def fence(self) -> tuple[int, int]:
        """Of the request "r"."""
        slot = self.states["r"].slot
        return slot, self.fences.nonce_in(slot)

    def found(self, key: str = "a" * 32) -> FoundStream | None:
        return self.directory.find([key]).get(key)


def test_what_cannot_be_streamed_is_counted_and_told() -> None:
    side = Side(num_rows=1)
    assert side.add(request("r", kv_transfer_params={"do_remote_decode": True})) == Handover.NO_KEY
    for key in ("A" * 32, "a" * 31, 5):
        params = {"do_remote_decode": True, "stream_key": key}
        assert side.add(request("r", kv_transfer_params=params)) == Handover.NO_KEY
    keys = ["1" * 32, "2" * 32, "3" * 32, "4" * 32]
    assert side.add(request("long", keys[0], num_tokens=65)) == Handover.NO_ROOM
    assert side.add(request("embeds", keys[1], prompt_embeds=object())) == Handover.PROMPT
    assert side.add(request("one", keys[2], num_tokens=64)) == Handover.STREAMED
    assert side.add(request("two", keys[2])) == Handover.REPEATED_KEY
    assert side.add(request("two", keys[3])) == Handover.NO_ROOM
    assert side.found(keys[2]) is None
    for key in (keys[0], keys[1], keys[3]):
        assert side.found(key).refusal
    side.producer.note_finish(side.states["one"])
    assert side.add(request("two", "5" * 32)) == Handover.STREAMED


def test_groups_are_listed_in_their_regions_and_the_rest_at_the_end() -> None:
    groups = (Group(STATE, 64), Group(FULL, 16), Group(WINDOW, 16), Group(FULL, 32))
    side = Side(groups=groups)
    regions = rows.regions_of(groups, 64)
    assert side.add(request("r")) == Handover.STREAMED
    (first,), _ = side.take_step(step(new={"r": (0, [[1], [2, 3], [4, 5], [6]], 32)}))
    assert first.listed == ((regions[1].place, (2, 3)), (regions[3].place, (6,)))
    (last,), _ = side.take_step(step(cached={"r": (32, [[], [7], [0, 8], [9]], 8)}))
    assert last.listed == ((regions[1].place + 2, (7,)), (regions[3].place + 1, (9,)))
    found = side.found()
    assert found is not None
    assert found.regions == [region.first for region in regions]
    rest = side.producer.rest_of(side.states["r"], ((1,), (2, 3, 7), (5, 8), (6, 9)))
    assert rest == ((regions[0].place, (1, 1)), (regions[2].place, (2, 5, 8)))
    assert side.producer.rest_of(PrefillState(request("other")), ((1,), (2,), (), (3,))) == ()


def test_a_prompt_of_which_nothing_will_be_handed_over_is_not_streamed() -> None:
    side = Side()
    assert side.add(request("r"), ends_well=False) == Handover.PROMPT
    assert side.found().refusal


def test_the_rest_is_published_behind_the_last_chunk(made: list[Work]) -> None:
    progress, fences = ProgressTable(2), FenceTable()
    fences.arm(FENCE_KEY)
    nonce = int(fences.nonces[5])
    publisher = Publisher(progress, fences, is_on_device=True)
    publisher.launched([Chunk(2, nonce, ((0, (7,)),), 16, begins=True)])
    publisher.ended([Hold("r", 60.0, 5, nonce, 2, ((64, (1, 9)),)), Hold("other", 60.0)])
    made[1].has_ended = True
    publisher.poll()
    assert read(progress, 2) == Header(nonce, nonce, 0)
    made[0].has_ended = True
    publisher.poll()
    assert read(progress, 2) == Header(nonce, nonce, 16, is_whole=True)
    assert rows.ids_in(progress.entries[2, [0, 64, 65]], nonce).tolist() == [7, 1, 9]
    publisher.prepare([], [Restart(2, 5, nonce)])
    publisher.ended([Hold("r", 60.0, 5, nonce, 2, ((64, (1, 8)),))])
    made[2].has_ended = True
    publisher.poll()
    assert not read(progress, 2).is_whole
    assert rows.ids_in(progress.entries[2, 65:66], nonce) == [9]


def test_without_a_fence_a_prompt_is_not_streamed() -> None:
    side = Side(num_slots=1)
    side.fences.take()
    assert side.add(request("r")) == Handover.STREAMED
    assert side.take_step(step(new={"r": (0, [[3]], 16)})) == ([], [])
    assert side.found().refusal


def test_ended_keys_are_remembered_for_a_while() -> None:
    directory = StreamDirectory()
    for number in range(MAX_ENDED + 1):
        directory.open(str(number), FoundStream(refusal="no"))
    assert "0" not in directory
    assert "1" in directory
