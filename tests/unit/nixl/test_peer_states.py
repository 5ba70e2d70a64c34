"""Which peers come into doubt, and the times between attempts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.decode.peers import Peer, PeerState
from vllm_commext.nixl.wire.client import BackOff

NOBODY: Any = None


@pytest.mark.parametrize("state", PeerState)
def test_a_peer_comes_into_doubt_only_where_it_is_read_from(state: PeerState) -> None:
    peer = Peer(("p", "host", 1, 0), NOBODY, state)
    peer.doubt()
    assert peer.state == (PeerState.SUSPECT if state == PeerState.READY else state)


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_waits_grow_up_to_the_cap_and_differ(failures: int, number: float, other: float) -> None:
    back_off = BackOff(0.1, 1.0)
    wait = back_off.seconds(failures, number)
    longest = min(1.0, 0.1 * 2 ** min(failures - 1, 10))
    assert longest / 2 <= wait <= longest
    assert (wait < back_off.seconds(failures, other)) <= (number < other)
    assert back_off.seconds(failures + 1, number) >= wait
