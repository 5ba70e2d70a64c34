"""The side channel's secret: what proves it passes once and in time, the rest is told why."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_commext.errors import ConfigError, ProtocolError
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire import seal
from vllm_commext.nixl.wire.description import describe
from vllm_commext.nixl.wire.seal import FrameSigner, FrameVerifier, read_secret

SECRET = b"0123456789abcdef"
OTHER = b"another secret of the same kind"
NONCE = b"n" * seal.NONCE_BYTES
NOW = 4_000_000_000.0
REQUEST = wire.DescribeRequest(engine_id="p", tp_rank=0)
FRAME = wire.encode(REQUEST)
REFUSED = wire.encode(wire.Refused(reason="no"))
DESCRIBED = wire.encode(describe(b"a description", "start-1"))


def sealed(**changes: Any) -> bytes:
    frame = seal.seal(SECRET, seal.REQUEST, FRAME, NONCE, NOW)
    decoded = seal.open_envelope(frame)
    assert decoded is not None
    return wire.encode(replace(decoded, **changes))


def test_a_proven_request_passes_and_its_answer_is_proven() -> None:
    signer, verifier = FrameSigner(SECRET), FrameVerifier(SECRET)
    request, nonce = verifier.admit(signer.prove(FRAME), time.time())
    assert request == FRAME
    assert signer.check(verifier.prove(DESCRIBED, nonce, time.time())) == DESCRIBED


@pytest.mark.parametrize(
    ("secret", "frame", "now", "words"),
    [
        (SECRET, FRAME, NOW, "carries no proof of it: set side_channel_secret_file"),
        (SECRET, b"hello", NOW, "not a frame of this protocol"),
        (None, sealed(), NOW, "this prefill engine has none"),
        (OTHER, sealed(), NOW, "sealed with another secret"),
        (SECRET, sealed(body=FRAME + b"\0"), NOW, "or altered"),
        (SECRET, sealed(nonce=b"m" * 16), NOW, "or altered"),
        (SECRET, sealed(sent=NOW + 1), NOW, "or altered"),
        (SECRET, sealed(sent=float("nan")), NOW, "or altered"),
        (SECRET, seal.seal(SECRET, seal.REPLY, FRAME, NONCE, NOW), NOW, "or altered"),
        (SECRET, seal.seal(SECRET, seal.REQUEST, FRAME, b"", NOW), NOW, "nonce of 16 bytes"),
        (SECRET, seal.seal(SECRET, seal.REQUEST, FRAME, NONCE, float("nan")), NOW, "clocks"),
        (SECRET, sealed(), NOW + seal.WINDOW_SECONDS + 1, "set the clocks"),
        (SECRET, sealed(), NOW - seal.WINDOW_SECONDS - 1, "set the clocks"),
    ],
)
def test_what_is_not_proven_is_refused_with_the_reason(
    secret: bytes | None, frame: bytes, now: float, words: str
) -> None:
    with pytest.raises(ProtocolError) as raised:
        FrameVerifier(secret).admit(frame, now)
    assert words in str(raised.value)
    for held in (SECRET, OTHER):
        assert held.decode() not in str(raised.value)


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def numbered(asker: int, number: int, sent: float) -> bytes:
    """A sealed request of one asker."""
    nonce = asker.to_bytes(8, "big") + number.to_bytes(8, "big")
    return seal.seal(SECRET, seal.REQUEST, FRAME, nonce, sent)


@pytest.mark.parametrize("step", [0.0, 1.0, 125.0, 3600.0, -3600.0, -125.0, 1e9, -1e9])
def test_no_step_of_the_clock_lets_a_repetition_in_or_an_asker_out(step: float) -> None:
    clock = Clock()
    verifier = FrameVerifier(SECRET, clock)
    first = [numbered(1, number, NOW) for number in (1, 2)]
    for frame in first:
        verifier.admit(frame, NOW)
    clock.now += 500.0
    for wall in (NOW + step, NOW, NOW + 30.0):
        for frame in first:
            with pytest.raises(ProtocolError, match="replayed request"):
                verifier.admit(frame, wall)
    for number in range(3, 2000, 2):
        verifier.admit(numbered(1, number + 1, NOW + step), NOW + 500.0)
        verifier.admit(numbered(1, number, NOW), NOW + step)


def test_who_asks_for_the_first_time_needs_one_of_two_clocks() -> None:
    """That of the wall, which may have been set right, or that of the start, carried on."""
    clock = Clock()
    verifier = FrameVerifier(SECRET, clock)
    begun = time.time()
    clock.now += 300.0
    verifier.admit(numbered(1, 1, begun + 300.0), begun + 300.0 + 3600.0)  # stepped forwards
    verifier.admit(numbered(2, 1, begun + 300.0), begun + 300.0 - 3600.0)  # and backwards
    verifier.admit(numbered(3, 1, begun + 7200.0), begun + 7200.0)  # set right
    with pytest.raises(ProtocolError, match="clocks"):
        verifier.admit(numbered(4, 1, begun + 300.0 - 3600.0), begun + 300.0)


@pytest.mark.parametrize("seconds", [[30.0, 60.0, 90.0], [100.0, 200.0]])
def test_after_a_restart_nothing_older_than_the_window_is_replayed(seconds: list[float]) -> None:
    """Whatever the asker, or who replays, has sent since."""
    clock, begun = Clock(), time.time()
    old = {number: begun - 60.0 + 12.0 * number for number in range(1, 6)}
    verifier = FrameVerifier(SECRET, clock)
    verifier.admit(numbered(1, 3, old[3]), begun)  # there is nothing yet to know it by
    for number, now in enumerate((begun + one for one in seconds), 50):
        clock.now = 1000.0 + now - begun
        verifier.admit(numbered(1, number, now), now)
        for one in [one for one, sent in old.items() if now - sent > seal.WINDOW_SECONDS]:
            with pytest.raises(ProtocolError, match="replayed request" if one == 3 else "clocks"):
                verifier.admit(numbered(1, one, old[one]), now)


def test_a_forked_process_is_another_asker() -> None:
    verifier, clock = FrameVerifier(SECRET), time.time()
    parent = FrameSigner(SECRET).prove(FRAME)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, FrameSigner(SECRET).prove(FRAME))
        os._exit(0)
    os.waitpid(pid, 0)
    verifier.admit(parent, clock)
    verifier.admit(os.read(reader, 4096), clock)
    verifier.admit(FrameSigner(SECRET).prove(FRAME), clock)
    assert len(verifier._askers._known) == 2
    os.close(reader)
    os.close(writer)


@given(st.lists(st.integers(0, 3 * seal.REORDERED), max_size=200))
@settings(max_examples=200)
def test_each_number_passes_at_most_once(numbers: list[int]) -> None:
    verifier = FrameVerifier(SECRET, Clock())
    passed: list[int] = []
    for number in numbers:
        try:
            verifier.admit(numbered(1, number, NOW), NOW)
        except ProtocolError:
            assert number in passed or number <= max(passed) - seal.REORDERED
        else:
            assert number not in passed
            passed.append(number)


def test_new_askers_are_limited_by_address_and_the_others_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seal, "MAX_NEW_ASKERS", 10)
    clock = Clock()
    verifier = FrameVerifier(SECRET, clock)
    for asker in range(10):
        verifier.admit(numbered(asker, 1, NOW), NOW, "flooder")
    for asker in range(10, 700):
        with pytest.raises(ProtocolError, match="retry later"):
            verifier.admit(numbered(asker, 1, NOW), NOW, "flooder")
        verifier.admit(numbered(5, asker, NOW), NOW, "flooder")  # it is known
        verifier.admit(numbered(9999, asker, NOW), NOW, "honest")
    clock.now += 2 * seal.WINDOW_SECONDS + 1
    verifier.admit(numbered(10, 1, NOW), NOW, "flooder")


def test_memory_for_askers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "MAX_ASKERS", 3)
    clock = Clock()
    verifier = FrameVerifier(SECRET, clock)
    frames = [numbered(asker, 1, NOW) for asker in range(3)]
    for frame in frames:
        verifier.admit(frame, NOW)
    with pytest.raises(ProtocolError, match="retry later"):
        verifier.admit(numbered(7, 1, NOW), NOW)
    clock.now += 2 * seal.WINDOW_SECONDS + 1
    verifier.admit(numbered(7, 1, NOW + 121), NOW + 121)
    assert len(verifier._askers._known) == 3
    for frame in frames:  # also of the one that was forgotten, whatever the clock says
        with pytest.raises(ProtocolError, match="replayed request"):
            verifier.admit(frame, NOW)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (DESCRIBED, "carries no proof"),
        (b"hello", "not a frame"),
        (seal.seal(SECRET, seal.REPLY, DESCRIBED, NONCE, NOW), "another request"),
        (seal.seal(OTHER, seal.REPLY, DESCRIBED, NONCE, NOW), "another secret"),
    ],
)
def test_an_answer_that_is_not_proven_is_refused(answer: bytes, words: str) -> None:
    signer = FrameSigner(SECRET)
    signer.prove(FRAME)
    with pytest.raises(ProtocolError, match=words):
        signer.check(answer)


def test_a_refusal_need_not_be_proven() -> None:
    assert FrameSigner(SECRET).check(REFUSED) == REFUSED


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=100)
def test_no_altered_frame_passes(noise: bytes, place: int, byte: int) -> None:
    frame = bytearray(sealed())
    frame[place % len(frame)] = byte
    for changed in (noise, bytes(frame)):
        try:
            admitted, _ = FrameVerifier(SECRET).admit(changed, NOW)
        except ProtocolError:
            continue
        assert admitted == FRAME


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    variable = {seal.SECRET_VARIABLE: OTHER.decode()}
    assert read_secret("", {}) is None
    assert read_secret("", variable) == OTHER
    assert read_secret(str(path), variable) == SECRET


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000, None])
def test_a_secret_that_cannot_be_used_stops_the_start(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="side_channel_secret_file") as raised:
        read_secret(str(path), {})
    assert "short" not in str(raised.value)
