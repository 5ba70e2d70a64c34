"""Bytes that real NIXL agents move between engines in one process, compared with a copy made
without NIXL."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import BLOCK_BYTES, expected_after, load_of, same, wait_until
from vllm_commext.nixl import transfer_thread
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.messages import MAX_NOTIFICATION_BYTES, Released

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]


@pytest.fixture(params=["strided", "expanded"])
def descriptor_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of NIXL's descriptor lists; older NIXL takes the second only."""
    strided = request.param == "strided"
    monkeypatch.setattr("vllm_commext.nixl.transport.agent.takes_strided_lists", lambda: strided)
    return request.param


def test_random_block_maps_arrive_to_the_byte(
    make_engine: MakeEngine, descriptor_form: str
) -> None:
    prefill = make_engine("p", seed=1, num_blocks=40, serve=True)
    decode = make_engine("d", seed=2, num_blocks=30)
    dice = random.Random(descriptor_form)
    expected = decode.memory
    loads = []
    free = dice.sample(range(30), 30)
    for number, first in enumerate([0, 0, 1, 3, 0, 2]):
        count = dice.randint(1, 5)
        local, free = free[:count], free[count:]
        remote = dice.sample(range(40), first + count + dice.randint(0, 2))
        pairs = list(zip(local, remote[first:], strict=False))
        expected = expected_after(expected, prefill.memory, pairs)
        loads.append(load_of(f"r{number}", prefill.remote(f"p{number}", remote), local, first))
    outcomes = decode.load(*loads)
    assert outcomes.failed == set()
    assert same(decode.memory, expected)
    num_blocks = sum(len(load.block_ids) for load in loads)
    recorded = decode.recorded
    assert len(recorded["transfer_seconds"]) == len(recorded["post_seconds"]) == len(loads)
    assert len(recorded["handshake_seconds"]) == 1
    assert recorded["descriptors"] == 3 * num_blocks
    assert 3 * len(loads) <= recorded["merged_descriptors"] <= 3 * num_blocks
    assert len(recorded["queue_seconds"]) == len(loads)
    assert recorded["bytes"] == 3 * BLOCK_BYTES * num_blocks


def test_the_comparison_notices_one_altered_byte(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2)
    expected = expected_after(decode.memory, prefill.memory, [(4, 7), (5, 2)])
    prefill.memory[1][7 * 128 + 95] ^= 1
    decode.load(load_of("r", prefill.remote("p", [7, 2]), [4, 5]))
    assert not same(decode.memory, expected)
    prefill.memory[1][7 * 128 + 95] ^= 1
    decode.load(load_of("again", prefill.remote("p", [7, 2]), [4, 5]))
    assert same(decode.memory, expected)


def test_layers_are_matched_by_name_and_caches_may_differ_in_stride_and_size(
    make_engine: MakeEngine,
) -> None:
    prefill = make_engine(
        "p", seed=1, num_blocks=50, stride_bytes=96, layer_names=["c", "a", "b"], serve=True
    )
    decode = make_engine("d", seed=2, num_blocks=10, layer_names=["a", "b", "c"])
    before = [row.copy() for row in decode.memory]
    decode.load(load_of("r", prefill.remote("p", [49, 0]), [9, 3]))
    assert decode.outcomes.failed == set()
    for own, theirs in enumerate([1, 2, 0]):
        row, source = before[own], prefill.memory[theirs]
        for local, remote in ((9, 49), (3, 0)):
            row[local * 128 : local * 128 + 96] = source[remote * 96 : remote * 96 + 96]
    assert same(decode.memory, before)


def test_four_engines_read_from_four(make_engine: MakeEngine) -> None:
    prefills = [make_engine(f"p{n}", seed=n, serve=True) for n in range(4)]
    decodes = [make_engine(f"d{n}", seed=10 + n) for n in range(4)]
    expected = []
    for number, decode in enumerate(decodes):
        rows = decode.memory
        for source, prefill in enumerate(prefills):
            local, remote = 5 * source + number, 3 * source + number
            rows = expected_after(rows, prefill.memory, [(local, remote)])
            prefill.thread.submit(Hold(f"r{number}", 60.0))
            load = load_of(f"from{source}", prefill.remote(f"r{number}", [remote]), [local])
            decode.thread.submit(load)
        expected.append(rows)
    names = {f"from{source}" for source in range(4)}
    for decode, rows in zip(decodes, expected, strict=True):
        outcomes = decode.wait(lambda decode=decode: decode.collect().received == names)
        assert outcomes.failed == set()
        assert same(decode.memory, rows)
    for prefill in prefills:
        prefill.wait(lambda prefill=prefill: len(prefill.collect().sent) == 4)


def test_a_read_releases_the_hold_and_nothing_else(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2)
    prefill.thread.submit(Hold("mine", 60.0))
    prefill.thread.submit(Hold("other", 60.0))
    assert prefill.collect().sent == set()
    decode.load(load_of("r", prefill.remote("mine", [1]), [1]))
    prefill.wait(lambda: prefill.collect().sent == {"mine"})


def test_a_release_that_comes_before_its_hold_counts(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2)
    decode.load(load_of("r", prefill.remote("mine", [1]), [1]))
    prefill.thread.submit(Hold("mine", 60.0))
    prefill.wait(lambda: prefill.collect().sent == {"mine"})


@pytest.mark.parametrize("awaited", [True, False])
def test_a_full_hit_only_releases(make_engine: MakeEngine, awaited: bool) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2)
    before = [row.copy() for row in decode.memory]
    prefill.thread.submit(Hold("mine", 60.0))
    decode.thread.submit(load_of("r", prefill.remote("mine", [1, 2]), [], 2, awaited=awaited))
    prefill.wait(lambda: prefill.collect().sent == {"mine"})
    if awaited:
        decode.wait(lambda: decode.collect().received == {"r"})
    assert decode.collect().failed == set()
    assert decode.outcomes.received == ({"r"} if awaited else set())
    assert same(decode.memory, before)
    assert decode.recorded["transfer_seconds"] == []


def test_a_hold_ends_with_its_lease(
    make_engine: MakeEngine, log_lines: pytest.LogCaptureFixture
) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    prefill.thread.submit(Hold("short", 0.05))
    prefill.thread.submit(Hold("long", 600.0))
    prefill.wait(lambda: prefill.collect().sent == {"short"})
    prefill.wait(lambda: bool(prefill.collect()) and prefill.recorded["expired_requests"] > 0)
    assert any("request short" in line and "freed" in line for line in log_lines.messages)
    assert prefill.collect().sent == {"short"}
    assert prefill.recorded["expired_requests"] == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello",
        b"",
        b"\xff\xfe\xfd\x00",
        wire.encode(Released(request_id="mine", consumer="c", num_consumers=1))[:-3],
        wire.encode(Released(request_id="mine", consumer="c", num_consumers=1, version=9)),
        b"x" * (MAX_NOTIFICATION_BYTES + 1),
        b"\x82\xa4kind\xa8released\xa1x" + b"\x91" * 3900 + b"\xc0",
    ],
)
def test_garbage_notifications_are_counted_and_the_next_one_counts(
    make_engine: MakeEngine, garbage: bytes, log_lines: pytest.LogCaptureFixture
) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    stranger = make_engine("s", seed=3)
    prefill.thread.submit(Hold("mine", 60.0))
    name = stranger.agent.add_peer(prefill.agent.metadata())
    stranger.agent.connect(name)
    stranger.agent.notify(name, garbage)
    prefill.wait(
        lambda: bool(prefill.collect()) and prefill.recorded["unmatched_notifications"] > 0
    )
    assert prefill.recorded["unmatched_notifications"] == 1
    assert prefill.outcomes.sent == set()
    assert [line for line in log_lines.messages if "ignored a NIXL notification" in line]
    right = Released(request_id="mine", consumer="c", num_consumers=1)
    stranger.agent.notify(name, wire.encode(right))
    prefill.wait(lambda: prefill.collect().sent == {"mine"})


def test_a_repeated_notification_counts_once(make_engine: MakeEngine) -> None:
    prefill = make_engine("p", seed=1, serve=True)
    stranger = make_engine("s", seed=3)
    name = stranger.agent.add_peer(prefill.agent.metadata())
    stranger.agent.connect(name)
    prefill.thread.submit(Hold("mine", 60.0))
    prefill.thread.submit(Hold("probe", 60.0))
    first = wire.encode(Released(request_id="mine", consumer="d/0", num_consumers=2))
    probe = wire.encode(Released(request_id="probe", consumer="d/0", num_consumers=1))
    for message in (first, first, first, probe):
        stranger.agent.notify(name, message)
    prefill.wait(lambda: "probe" in prefill.collect().sent)
    assert prefill.outcomes.sent == {"probe"}
    second = wire.encode(Released(request_id="mine", consumer="d/1", num_consumers=2))
    stranger.agent.notify(name, second)
    prefill.wait(lambda: prefill.collect().sent == {"mine", "probe"})


def test_stop_ends_the_threads_and_may_be_repeated(make_engine: MakeEngine) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2)
    decode.load(load_of("r", prefill.remote("mine", [1]), [1]))
    for engine in (decode, prefill, decode):
        engine.close()
    started = [thread for thread in threading.enumerate() if thread.ident not in before]
    assert [thread.name for thread in started if thread.name.startswith("commext")] == []


def test_a_worker_that_only_holds_blocks_looks_for_releases_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends a hold at once, and looks at everything again when there is something to do."""
    monkeypatch.setattr(transfer_thread, "DUTY_WAIT_SECONDS", 3600.0)
    prefill, decode = make_engine("p", seed=1, serve=True), make_engine("d", seed=3)
    looks: list[float] = []
    poll = prefill.thread._loader.poll
    monkeypatch.setattr(
        prefill.thread._loader, "poll", lambda: (looks.append(prefill.thread._next_turn), poll())[1]
    )
    prefill.thread.submit(Hold("mine", 600.0))
    prefill.thread.submit(Hold("other", 600.0))
    wait_until(lambda: prefill.thread._next_turn > 0, "a look at what is held")
    num_looks = len(looks)
    name = decode.agent.add_peer(prefill.agent.metadata())
    decode.agent.connect(name)
    released = Released(request_id="mine", consumer="d/0", num_consumers=1)
    decode.agent.notify(name, wire.encode(released))
    prefill.wait(lambda: prefill.collect().sent == {"mine"})
    assert len(looks) == num_looks
    prefill.thread.submit(Hold("more", 600.0))
    wait_until(lambda: len(looks) > num_looks, "a look after a command")
