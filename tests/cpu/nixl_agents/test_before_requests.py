"""What a decode worker does when no request needs it: prefill engines that configuration names are
connected to, and the first peer's speed is measured; neither holds up a request."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from tests.cpu.nixl_agents.harness import (
    BLOCK_BYTES,
    HOST,
    SlowReads,
    assert_works,
    load_of,
    states,
    wait_until,
)
from tests.kit.servers import free_port
from vllm_commext.nixl.decode import loader
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.transport import probe

MakeEngine = Callable[..., Any]
Lines = pytest.LogCaptureFixture


def test_its_workers_are_those_that_requests_will_name(make_engine: MakeEngine) -> None:
    """An address may have several names; the engine says which one its requests carry."""
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2, peers=[f"localhost:{prefill.port}"])
    wait_until(lambda: states(decode) == {"ready": 1}, "the named peer")
    ((_, host, port, rank),) = decode.thread._loader._peers._peers
    assert (host, port, rank) == (HOST, prefill.port, 0)
    assert_works(decode, prefill)
    assert states(decode) == {"ready": 1}
    decode.collect()
    recorded = decode.recorded
    assert len(recorded["handshake_seconds"]) == 1, "the request asked once more"
    for name in ("transfer_seconds", "post_seconds", "queue_seconds"):
        assert len(recorded[name]) == 1, name
    assert (recorded["descriptors"], recorded["bytes"]) == (6, 6 * BLOCK_BYTES)


def test_an_engine_that_starts_later_is_found(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, log_lines: Lines
) -> None:
    port = free_port()
    decode = make_engine("d", seed=2, peers=[f"{HOST}:{port}"])
    wait_until(lambda: "does not answer yet" in log_lines.text, "the first question's end")
    assert states(decode) == {}
    prefill = make_engine("p", seed=1, serve=True, port=port)
    wait_until(lambda: states(decode) == {"ready": 1}, "the named peer")
    assert_works(decode, prefill)


def test_an_engine_that_never_answers_is_given_up_and_harms_nobody(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, log_lines: Lines
) -> None:
    monkeypatch.setattr(loader, "BACK_OFF", loader.BackOff(0.01, 0.01))
    monkeypatch.setattr(loader, "MAX_FAILURES", 3)
    gone = free_port()
    prefill = make_engine("p", seed=1, serve=True)
    decode = make_engine("d", seed=2, peers=[f"{HOST}:{gone}", f"{HOST}:{prefill.port}"])
    wait_until(lambda: "has not answered 3 times" in log_lines.text, "the end of asking")
    wait_until(lambda: states(decode) == {"ready": 1}, "the named peer")
    assert not len(decode.thread._loader._preconnect)
    assert_works(decode, prefill)


def test_only_ranks_that_are_read_from_are_connected(make_engine: MakeEngine) -> None:
    """The first rank tells of all; this engine's one reads from both, and one serves here."""
    first = make_engine("p", seed=1, serve=True, rank=Rank(2, 0))
    decode = make_engine("d", seed=2, peers=[f"{HOST}:{first.port}"])
    wait_until(lambda: states(decode) == {"ready": 1, "lost": 1}, "both ranks")


Events = list[str]


def watched(decode: Any, events: Events, num_turns: int) -> None:
    """Have a measurement of so many turns noted, with all reads that begin and all that end."""
    loader = decode.thread._loader
    post, note = loader._reads.post, loader._outcomes.note

    def measure(link: Link) -> Generator[None]:
        for _ in range(num_turns):
            events.append("turn")
            yield

    def note_post(*args: Any) -> None:
        events.append("read")
        post(*args)

    def note_end(*args: Any, **failure: Any) -> None:
        events.append("end")
        note(*args, **failure)

    loader._probe = measure
    loader._reads.post = note_post
    loader._outcomes.note = note_end


def test_a_request_that_comes_meanwhile_is_read_between_two_turns(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_engine("p", seed=1, serve=True), make_engine("d", seed=2)
    events: Events = []
    watched(decode, events, num_turns=1000)
    decode.load(load_of("r", prefill.remote("x", [9]), [7]))
    wait_until(lambda: "turn" in events, "the measurement")
    slow = SlowReads(decode.agent, monkeypatch)
    decode.thread.submit(load_of("s", prefill.remote("y", [9]), [7]))
    wait_until(lambda: slow.has_arrived, "the second read")
    slow.end()
    decode.wait(lambda: "s" in decode.collect().received)
    known = list(events)
    place = len(known) - 1 - known[::-1].index("read")
    assert known[place + 1] == "end", "the measurement went on beside the read"
    assert known[:3] == ["read", "end", "turn"], "the first request waited"
    assert "turn" in known[:place]


def test_the_measurement_reads_and_gives_everything_back(make_engine: MakeEngine) -> None:
    """Of an agent that nobody else uses: a read a turn, and what was prepared is released."""
    stride = (4 << 20) // 24
    stride -= stride % 48
    size = {"num_layers": 1, "stride_bytes": stride + BLOCK_BYTES}
    prefill = make_engine("p", seed=1, serve=True, **size)
    decode = make_engine("d", seed=2, **size)
    found: list[Any] = []
    loader = decode.thread._loader
    scratch = np.zeros(2 << 20, dtype=np.uint8)

    def measure(link: Link) -> Generator[None]:
        local = probe.Memory(scratch.ctypes.data, scratch.nbytes, "DRAM", 0, scratch)
        remote = probe.Memory(
            *probe.longest_run(link.plan.remote), link.memory_type, link.device_id
        )
        with decode.agent.registered((local.address, local.num_bytes, 0), "DRAM"):
            speed = yield from probe.measure(decode.agent, link.agent_name, local, remote)
        found.append(speed)

    loader._probe = measure
    decode.load(load_of("r", prefill.remote("x", [9]), [7]))
    wait_until(lambda: bool(found), "the measurement")
    assert found[0].num_bytes == scratch.nbytes
    assert found[0].bytes_per_second > 0
    assert np.array_equal(scratch, prefill.memory[0][: scratch.nbytes])
    decode.load(load_of("s", prefill.remote("y", [9]), [7]))
    assert not decode.outcomes.failed


def test_the_end_comes_in_the_middle_of_a_measurement(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("p", seed=1, serve=True), make_engine("d", seed=2)
    begun: list[str] = []
    ended: list[str] = []

    def measure(link: Link) -> Generator[None]:
        begun.append(link.agent_name)
        try:
            while True:
                yield
        finally:
            ended.append(link.agent_name)

    decode.thread._loader._probe = measure
    decode.load(load_of("r", prefill.remote("x", [9]), [7]))
    wait_until(lambda: bool(begun), "the measurement")
    decode.close()
    assert ended == begun
    assert decode.thread._loader._probing is None
