"""What a decode worker knows of its peers: which of their requests it keeps alive, and when,
against a plain model; and which peers come into doubt."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.decode import uses
from vllm_commext.nixl.decode.peers import Peer, PeerState
from vllm_commext.nixl.decode.uses import MAX_IDS, MAX_IDS_BYTES, Heartbeats, batches

PEERS = [("p", "host", 1, rank) for rank in range(2)]
IDS = st.text(st.characters(codec="utf-8"), max_size=40)


@given(st.lists(IDS, max_size=600))
def test_batches_are_bounded_and_hold_each_id_once_in_order(ids: list[str]) -> None:
    found = list(batches(ids))
    assert [one for batch in found for one in batch] == list(dict.fromkeys(ids))
    for batch in found:
        assert 1 <= len(batch) <= MAX_IDS
        assert len(batch) == 1 or sum(len(one.encode()) for one in batch) <= MAX_IDS_BYTES


def test_batches_are_as_few_as_they_can_be() -> None:
    sizes = [len(batch) for batch in batches(str(number) for number in range(2 * MAX_IDS + 1))]
    assert sizes == [MAX_IDS, MAX_IDS, 1]
    assert [len(batch) for batch in batches("x" * 9000 + str(n) for n in range(5))] == [3, 2]


def test_an_id_that_cannot_be_sent_is_left_out() -> None:
    watched = Heartbeats()
    for bad in ("half\ud800", "x" * (MAX_IDS_BYTES + 1)):
        watched.watch("r", PEERS[0], bad, 0.0)
    assert len(watched) == 0
    assert watched.due(1e9) == []


@given(
    st.lists(
        st.tuples(st.sampled_from("wdet"), st.integers(0, 4), st.integers(0, 1), st.integers(0, 9)),
        max_size=60,
    )
)
def test_random_histories(steps: list[tuple[str, int, int, int]]) -> None:
    """w: watch; d: drop; e: end everywhere; t: time passes and what is due is taken."""
    watched = Heartbeats()
    model: dict[int, dict[str, str]] = {0: {}, 1: {}}
    next_due: dict[int, float] = {}
    now = 0.0
    for step, number, rank, seconds in steps:
        name = f"r{number}"
        if step == "w":
            watched.watch(name, PEERS[rank], f"p{number}", now + seconds)
            model[rank][name] = f"p{number}"
            next_due[rank] = min(next_due.get(rank, now + seconds), now + seconds)
        elif step == "d":
            watched.drop(name, PEERS[rank])
            model[rank].pop(name, None)
        elif step == "e":
            watched.drop_everywhere(name)
            for known in model.values():
                known.pop(name, None)
        else:
            now += seconds
            due = {one for one, when in next_due.items() if when <= now}
            assert set(watched.due(now)) == {PEERS[one] for one in due}
            for one in due:
                assert watched.take(PEERS[one], now + 3) == list(model[one].values())
                next_due[one] = now + 3
        for one in [one for one in next_due if not model[one]]:
            del next_due[one]
        assert len(watched) == sum(map(len, model.values()))


def test_six_in_a_lease() -> None:
    assert uses.interval_of(60.0) == 10.0


@pytest.mark.parametrize("state", PeerState)
def test_a_peer_comes_into_doubt_only_where_it_is_read_from(state: PeerState) -> None:
    channel: Any = None
    peer = Peer(("p", "host", 1, 0), channel, state)
    peer.doubt()
    assert peer.state == (PeerState.SUSPECT if state == PeerState.READY else state)
