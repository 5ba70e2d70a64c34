"""Reads through mappings between real agents: everything around them is as with NIXL's reads.  The
kernel runs on the CPU, and mapped memory is that of the process itself at other addresses."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import (
    BLOCK_BYTES,
    assert_works,
    expected_after,
    load_of,
    same,
    wait_for_back_off,
    wait_until,
)
from tests.kit.host_kernels import COMPILER
from tests.kit.mapped_memory import HostDevice, HostOffer
from vllm_commext.nixl.mapped import Mapper
from vllm_commext.nixl.prefill.fence import KEY_BYTES, FenceSlots
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.transfer_thread import GiveUp
from vllm_commext.nixl.transport import gather

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine"),
]
PLACE = "here"

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture


class Pair:
    """A prefill worker that offers its memory, and a decode worker that maps it."""

    def __init__(self, make_engine: MakeEngine, *, stride_bytes: int = 0, **settings: Any) -> None:
        self.device = HostDevice()
        self.make_engine = make_engine
        self.prefill = self.offering("p", seed=1, stride_bytes=stride_bytes)
        settings |= {"mapper": Mapper(self.device, PLACE), "stride_bytes": stride_bytes}
        self.decode = make_engine("d", seed=2, **settings)
        self.slots = FenceSlots(bytes(KEY_BYTES), 4)
        self.prefill.tables.fences.arm(bytes(KEY_BYTES))

    def offering(self, engine_id: str, place: str = PLACE, **settings: Any) -> Any:
        """A prefill worker with an offer, which is kept as ``offered``."""

        def offer(rows: Any) -> Any:
            self.offered = HostOffer(rows, place)
            return self.offered.offer

        return self.make_engine(engine_id, serve=True, offer=offer, **settings)

    def remote(self, name: str, blocks: list[int], lease_seconds: float = 600.0) -> Any:
        """A finished prefill, which is held."""
        slot, nonce = self.slots.take() or (-1, 0)
        self.prefill.thread.submit(Hold(name, lease_seconds, slot, nonce))
        return self.prefill.remote(name, blocks, fence_slot=slot, fence_nonce=nonce)

    @property
    def num_open(self) -> int:
        """Mappings that the decode worker has open."""
        return sum(self.device.opened.values())

    @property
    def num_proofs(self) -> int:
        """Fences that the decode worker has read."""
        return self.decode.thread._loader._reads.num_proofs


@pytest.fixture
def pair(make_engine: MakeEngine) -> Pair:
    return Pair(make_engine)


def test_every_byte_arrives_and_is_counted_as_mapped(
    pair: Pair, log_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "MAX_PIECES", 7)
    dice = random.Random(3)
    local, remote = dice.sample(range(24), 20), dice.sample(range(24), 20)
    expected = expected_after(
        pair.decode.memory, pair.prefill.memory, list(zip(local, remote, strict=True))
    )
    pair.decode.load(load_of("r", pair.remote("x", remote), local))
    assert same(pair.decode.memory, expected)
    assert pair.decode.outcomes.failed == set()
    recorded = pair.decode.recorded
    assert recorded["mapped_bytes"] == recorded["bytes"] > 0
    assert recorded["descriptors"] == 60
    assert pair.device.num_launches == 1 + 9  # the token, and the read in sevens
    pair.prefill.wait(lambda: "x" in pair.prefill.collect().sent)
    assert not [line for line in log_lines.messages if "not mapped" in line]


def test_a_few_large_pieces_are_left_to_nixl(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by read: blocks side by side are one piece a layer to it, scattered ones many."""
    monkeypatch.setattr("vllm_commext.nixl.mapped.LARGE_BYTES", 4 * BLOCK_BYTES)
    pair = Pair(make_engine, stride_bytes=BLOCK_BYTES)
    shape = {"block_bytes": BLOCK_BYTES, "stride_bytes": BLOCK_BYTES}
    for name, own, theirs, is_mapped in (
        ("together", list(range(2, 10)), list(range(5, 13)), False),
        ("scattered", list(range(2, 10)), list(range(20, 4, -2)), True),
    ):
        pairs = list(zip(own, theirs, strict=True))
        expected = expected_after(pair.decode.memory, pair.prefill.memory, pairs, **shape)
        before = dict(pair.decode.recorded)
        pair.decode.load(load_of(name, pair.remote(name, theirs), own))
        assert pair.decode.outcomes.failed == set()
        assert same(pair.decode.memory, expected)
        mapped, total = (
            pair.decode.recorded[key] - before[key] for key in ("mapped_bytes", "bytes")
        )
        assert mapped == total * is_mapped
        assert total == 3 * 8 * BLOCK_BYTES


@pytest.mark.parametrize("frees", [False, True])
def test_the_fence_is_read_when_the_bytes_are_there(
    pair: Pair, log_lines: Lines, frees: bool
) -> None:
    """What was freed while it was read is not used, however late the freeing is."""
    assert_works(pair.decode, pair.prefill, "first")
    before = pair.num_proofs
    pair.device.is_held = True
    remote = pair.remote("x", [9], 0.3 if frees else 600.0)
    expected = expected_after(pair.decode.memory, pair.prefill.memory, [(7, 9)])
    pair.decode.thread.submit(load_of("r", remote, [7]))
    wait_until(lambda: pair.decode.thread._loader.num_reads > 0, "the read to begin")
    if frees:
        pair.prefill.wait(lambda: "x" in pair.prefill.collect().sent)
    assert pair.num_proofs == before
    pair.device.is_held = False
    pair.decode.wait(lambda: "r" in pair.decode.collect().received)
    assert pair.num_proofs == before + 1
    assert pair.decode.outcomes.failed == ({"r"} if frees else set())
    assert frees or same(pair.decode.memory, expected)
    refusals = [line for line in log_lines.messages if "KV cache not loaded" in line]
    assert len(refusals) == frees
    assert all("had freed the blocks before they were read" in line for line in refusals)


def test_a_late_read_keeps_its_mapping_until_it_has_ended(make_engine: MakeEngine) -> None:
    """Whatever becomes of the peer: memory that a kernel may read is never unmapped."""
    pair = Pair(make_engine, transfer_timeout=0.5)
    assert_works(pair.decode, pair.prefill, "first")
    num_open = pair.num_open
    assert num_open == 1 + 3
    pair.device.is_held = True
    pair.decode.thread.submit(load_of("r", pair.remote("x", [9]), [7]))
    pair.decode.wait(lambda: pair.decode.collect().late == {"r"})
    pair.decode.thread.submit(GiveUp("r"))
    pair.decode.wait(lambda: "r" in pair.decode.collect().failed)
    pair.prefill.server.close()  # to the decode engine it is gone
    pair.prefill.server = None
    links = pair.decode.thread._loader._peers._links
    wait_until(lambda: not links.live() and links.num_retired == 1, "the peer to be given up")
    assert pair.decode.collect().settled == set()
    assert pair.num_open == num_open
    pair.device.is_held = False
    pair.decode.wait(lambda: pair.decode.collect().settled == {"r"})
    wait_until(lambda: pair.num_open == 0, "the mapping to be closed")
    pair.decode.close()
    assert pair.device.is_closed


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("older", "it offers no mapped memory"),
        ("place", "on another host, or in another IPC namespace"),
        ("refused", "CUDA has said no"),
        ("token", "data mismatch"),
        ("outside", "outside of it"),
        ("failed", "CUDA reports 700"),
        ("silent", "got none"),
    ],
)
def test_what_cannot_be_mapped_is_read_by_nixl(
    pair: Pair, log_lines: Lines, monkeypatch: pytest.MonkeyPatch, case: str, words: str
) -> None:
    monkeypatch.setattr("vllm_commext.nixl.mapped.CHECK_SECONDS", 0.2)
    if case == "older":
        other = pair.make_engine("q", seed=3, serve=True)
    elif case == "outside":
        offer = HostOffer([], PLACE)
        other = pair.make_engine("q", seed=3, serve=True, offer=lambda _: offer.offer)
    else:
        other = pair.offering("q", "elsewhere" if case == "place" else PLACE, seed=3)
    if case == "token":
        pair.offered.spoil()
    pair.device.refusal = words if case == "refused" else ""
    pair.device.error = words if case == "failed" else ""
    pair.device.is_held = case == "silent"
    assert_works(pair.decode, other, "a")
    assert_works(pair.decode, other, "b")
    lines = [line for line in log_lines.messages if "read by NIXL and not mapped" in line]
    assert len(lines) == 1
    assert words in lines[0]
    assert "engine q at" in lines[0]
    assert pair.decode.recorded["mapped_bytes"] == 0
    # What may still be read stays mapped.
    assert pair.num_open == (4 if case == "silent" else 0)
    pair.device.refusal = pair.device.error = ""
    pair.device.is_held = False
    assert_works(pair.decode, pair.prefill, "mapped")
    assert pair.decode.recorded["mapped_bytes"] > 0
    pair.device.opened.clear()  # what the silent read has left
    pair.device.forget()


def test_a_launch_that_fails_ends_its_load_and_the_next_one_connects_anew(
    pair: Pair, log_lines: Lines
) -> None:
    assert_works(pair.decode, pair.prefill, "first")
    pair.device.error = "CUDA reports 700"
    pair.decode.load(load_of("r", pair.remote("x", [9]), [7]))
    assert pair.decode.outcomes.failed == {"r"}
    (line,) = [line for line in log_lines.messages if "KV cache not loaded" in line]
    assert "a mapped read: CUDA reports 700" in line
    assert pair.decode.recorded["failures"] == {"transfer": 1}
    pair.device.error = ""
    wait_for_back_off(pair.decode)
    assert_works(pair.decode, pair.prefill, "later")
    assert len(pair.decode.recorded["handshake_seconds"]) == 2


def test_a_launch_that_is_refused_is_tried_over_a_new_connection(pair: Pair) -> None:
    assert_works(pair.decode, pair.prefill, "first")
    pair.device.num_refused = 1
    assert_works(pair.decode, pair.prefill, "again")
    assert pair.decode.recorded["retries"] == 1
    assert len(pair.decode.recorded["handshake_seconds"]) == 2
