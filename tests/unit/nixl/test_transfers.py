"""All that a worker does for one remote request: each of its uses ends once, when its last part
has, whatever failed or was given up before, and each source is released once no use needs it."""

import math
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import CommextError, ProtocolError, UnsupportedError
from vllm_commext.nixl.decode.transfers import (
    RELEASE_DELAY_SECONDS,
    Failure,
    Part,
    Transfer,
    Use,
    failure_of,
    identity,
)
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Sources
from vllm_commext.nixl.requests import Load, RemoteRequest

REMOTE = RemoteRequest("p", "", "h", 5600, 4, "there", ((1,),), 16)
FIRST = Failure("transfer", ProtocolError("first"))
SECOND = Failure("expired", ProtocolError("second"))


def transfer_of(num_read: int, num_others: int = 0) -> Transfer:
    ranks = range(num_read + num_others)
    return Transfer(
        REMOTE, Sources(tuple(ranks[:num_read]), tuple(ranks[num_read:]), dict.fromkeys(ranks, 2))
    )


def load_named(request_id: str, block_ids: tuple[int, ...] = (1,)) -> Load:
    return Load(request_id, REMOTE, (Blocks(0, list(block_ids)),), 16)


def now() -> float:
    return time.perf_counter()


def later() -> float:
    return now() + RELEASE_DELAY_SECONDS


def due(transfer: Transfer, when: float) -> list[int]:
    return [source.key[3] for source in transfer.take_due(when)]


def test_a_source_is_released_a_moment_after_it_was_read() -> None:
    transfer = transfer_of(2)
    one, other = transfer.begin(load_named("r"))
    transfer.close(one)
    assert due(transfer, now()) == []
    assert due(transfer, later()) == [0]
    assert not transfer.is_over
    transfer.close(other)
    assert not transfer.is_over
    assert due(transfer, later()) == [1]
    assert transfer.is_over
    assert due(transfer, later()) == []


def test_what_is_not_read_is_released_at_once() -> None:
    transfer = transfer_of(1, 2)
    (part,) = transfer.begin(load_named("r"))
    assert due(transfer, now()) == [1, 2]
    transfer.close(part, FIRST)
    assert due(transfer, now()) == [0]
    nothing_missing = transfer_of(2, 1)
    assert nothing_missing.begin(load_named("r", ())) == []
    assert nothing_missing.end(nothing_missing.uses["r"])
    assert due(nothing_missing, now()) == [0, 1, 2]
    assert nothing_missing.is_over


def test_a_further_use_within_the_moment_defers_the_release() -> None:
    transfer = transfer_of(1)
    (first,) = transfer.begin(load_named("r"))
    transfer.close(first)
    (second,) = transfer.begin(load_named("again"))
    assert due(transfer, later()) == []
    transfer.close(second)
    assert due(transfer, later()) == [0]


def test_one_that_waits_keeps_every_source() -> None:
    transfer = transfer_of(1, 1)
    waiting = transfer.wait("later")
    (part,) = transfer.begin(load_named("r"))
    assert transfer.close(part)
    assert not transfer.end(waiting)
    assert transfer.next_release == math.inf
    (part,) = transfer.begin(load_named("later"))
    assert due(transfer, now()) == [1]
    assert transfer.close(part)
    assert due(transfer, later()) == [0]


def test_sources_under_wrong_parameters() -> None:
    wrong, right = transfer_of(2), transfer_of(4)
    for part in wrong.begin(load_named("r")):
        wrong.give_up_sources()
        wrong.close(part, FIRST)
    assert due(wrong, later()) == []
    right.release_unused()
    assert due(right, now()) == [0, 1, 2, 3]


def test_what_tells_remote_requests_apart() -> None:
    other = RemoteRequest("p", "", "h", 5600, 4, "other", ((1,),), 16)
    assert identity(REMOTE) != identity(other)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnsupportedError("x"), "configuration"),
        (ProtocolError("x"), "handshake"),
        (CommextError("x"), "handshake"),
        (KeyError("x"), "internal"),
    ],
)
def test_reasons_of_errors(error: Exception, reason: str) -> None:
    failure = failure_of(error, "handshake")
    assert failure.reason == reason
    assert ("KeyError('x')" in failure.text) == (reason == "internal")


@dataclass
class Expected:
    use: Use
    parts: list[Part]
    failures: list[Failure] = field(default_factory=list[Failure])


@given(st.data())
@settings(max_examples=100)
def test_random_histories_end_every_use_and_release_every_source_once(data: st.DataObject) -> None:
    transfer = transfer_of(data.draw(st.integers(1, 4)))
    open_uses: dict[str, Expected] = {}
    freed: set[int] = set()
    for number in range(data.draw(st.integers(1, 4))):
        name = f"r{number}"
        if data.draw(st.booleans()):
            transfer.wait(name)
        parts = transfer.begin(load_named(name))
        assert [part.key for part in parts] == [("p", "h", 5600, n) for n in transfer.sources]
        open_uses[name] = Expected(transfer.uses[name], parts)
    while open_uses:
        name = data.draw(st.sampled_from(sorted(open_uses)))
        expected = open_uses[name]
        failure = data.draw(st.sampled_from([None, FIRST, SECOND]))
        expected.failures += [failure] if failure else []
        part = expected.parts.pop(data.draw(st.integers(0, len(expected.parts) - 1)))
        freed |= {part.worker} if failure is SECOND else set[int]()  # its lease ran out
        assert transfer.close(part, failure) == (not expected.parts)
        if not expected.parts:
            assert expected.use.failure is (expected.failures[0] if expected.failures else None)
            del open_uses[name]
        wanted = {one.worker for other in open_uses.values() for one in other.parts}
        in_use = {worker for worker, source in transfer.sources.items() if source.num_users}
        assert in_use == wanted
        assert transfer.uses.keys() == open_uses.keys()
    assert sorted(due(transfer, later())) == sorted(transfer.sources.keys() - freed)
    assert transfer.is_over
