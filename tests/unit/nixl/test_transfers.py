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
    RemotePrefill,
    ShardRead,
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


def transfer_of(num_read: int, num_others: int = 0) -> RemotePrefill:
    ranks = range(num_read + num_others)
    return RemotePrefill(REMOTE, Sources(tuple(ranks[:num_read]), dict.fromkeys(ranks, 2)))


def load_named(request_id: str, block_ids: tuple[int, ...] = (1,)) -> Load:
    return Load(request_id, REMOTE, (Blocks(0, list(block_ids)),), 16)


def now() -> float:
    return time.perf_counter()


def later() -> float:
    return now() + RELEASE_DELAY_SECONDS


def due(prefill: RemotePrefill, when: float) -> list[int]:
    return [source.key[3] for source in prefill.take_due(when)]


def test_a_source_is_released_a_moment_after_it_was_read() -> None:
    prefill = transfer_of(2)
    one, other = prefill.begin(load_named("r"))
    prefill.close(one)
    assert due(prefill, now()) == []
    assert due(prefill, later()) == [0]
    assert not prefill.is_over
    prefill.close(other)
    assert not prefill.is_over
    assert due(prefill, later()) == [1]
    assert prefill.is_over
    assert due(prefill, later()) == []


def test_what_is_not_read_is_released_at_once() -> None:
    prefill = transfer_of(1, 2)
    (shard,) = prefill.begin(load_named("r"))
    assert due(prefill, now()) == [1, 2]
    prefill.close(shard, FIRST)
    assert due(prefill, now()) == [0]
    nothing_missing = transfer_of(2, 1)
    assert nothing_missing.begin(load_named("r", ())) == []
    assert nothing_missing.end(nothing_missing.uses["r"])
    assert due(nothing_missing, now()) == [0, 1, 2]
    assert nothing_missing.is_over


def test_a_further_use_within_the_moment_defers_the_release() -> None:
    prefill = transfer_of(1)
    (first,) = prefill.begin(load_named("r"))
    prefill.close(first)
    (second,) = prefill.begin(load_named("again"))
    assert due(prefill, later()) == []
    prefill.close(second)
    assert due(prefill, later()) == [0]


def test_one_that_waits_keeps_every_source() -> None:
    prefill = transfer_of(1, 1)
    waiting = prefill.wait("later")
    (shard,) = prefill.begin(load_named("r"))
    assert prefill.close(shard)
    assert not prefill.end(waiting)
    assert prefill.next_release == math.inf
    (shard,) = prefill.begin(load_named("later"))
    assert due(prefill, now()) == [1]
    assert prefill.close(shard)
    assert due(prefill, later()) == [0]


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
    shards: list[ShardRead]
    failures: list[Failure] = field(default_factory=list[Failure])


@given(st.data())
@settings(max_examples=100)
def test_random_histories_end_every_use_and_release_every_source_once(data: st.DataObject) -> None:
    prefill = transfer_of(data.draw(st.integers(1, 4)))
    open_uses: dict[str, Expected] = {}
    freed: set[int] = set()
    for number in range(data.draw(st.integers(1, 4))):
        name = f"r{number}"
        if data.draw(st.booleans()):
            prefill.wait(name)
        shards = prefill.begin(load_named(name))
        assert [shard.key for shard in shards] == [("p", "h", 5600, n) for n in prefill.sources]
        open_uses[name] = Expected(prefill.uses[name], shards)
    while open_uses:
        name = data.draw(st.sampled_from(sorted(open_uses)))
        expected = open_uses[name]
        failure = data.draw(st.sampled_from([None, FIRST, SECOND]))
        expected.failures += [failure] if failure else []
        shard = expected.shards.pop(data.draw(st.integers(0, len(expected.shards) - 1)))
        freed |= {shard.worker} if failure is SECOND else set[int]()  # its lease ran out
        assert prefill.close(shard, failure) == (not expected.shards)
        if not expected.shards:
            assert expected.use.failure is (expected.failures[0] if expected.failures else None)
            del open_uses[name]
        wanted = {one.worker for other in open_uses.values() for one in other.shards}
        in_use = {worker for worker, source in prefill.sources.items() if source.num_users}
        used_at = {
            one.key.number for one in prefill.sources.values() if prefill.is_used_at(one.key)
        }
        assert in_use == used_at == wanted
        assert prefill.uses.keys() == open_uses.keys()
    assert sorted(due(prefill, later())) == sorted(prefill.sources.keys() - freed)
    assert prefill.is_over
