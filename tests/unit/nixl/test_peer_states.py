"""Every event in every state, and the times between attempts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.decode.peer_states import PeerEvent, PeerState, next_state
from vllm_commext.nixl.wire.client import BackOff

# A row a state: what NEEDED, ANSWERED, FAILED, DOUBTED and UNUSED make of it.
TABLE = {
    "unknown": ("handshaking", "unknown", "unknown", "unknown", "retired"),
    "handshaking": ("handshaking", "ready", "lost", "handshaking", "retired"),
    "ready": ("ready", "ready", "ready", "suspect", "retired"),
    "suspect": ("handshaking", "suspect", "suspect", "suspect", "retired"),
    "lost": ("handshaking", "lost", "lost", "lost", "retired"),
    "retired": ("retired", "retired", "retired", "retired", "retired"),
}
EVENTS = ("needed", "answered", "failed", "doubted", "unused")


def test_the_table_here_is_complete() -> None:
    assert set(TABLE) == {state.value for state in PeerState}
    assert set(EVENTS) == {event.value for event in PeerEvent}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TABLE, EVENTS)))
def test_every_event_in_every_state(state: str, event: str) -> None:
    expected = TABLE[state][EVENTS.index(event)]
    assert next_state(PeerState(state), PeerEvent(event)).value == expected


@given(st.lists(st.sampled_from(list(PeerEvent)), max_size=30))
def test_a_peer_becomes_ready_only_by_an_answer_and_never_after_its_end(
    events: list[PeerEvent],
) -> None:
    state = PeerState.UNKNOWN
    for event in events:
        before, state = state, next_state(state, event)
        if state == PeerState.READY and before != PeerState.READY:
            assert (before, event) == (PeerState.HANDSHAKING, PeerEvent.ANSWERED)
        if before == PeerState.RETIRED:
            assert state == PeerState.RETIRED


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_waits_grow_up_to_the_cap_and_differ(failures: int, number: float, other: float) -> None:
    back_off = BackOff(0.1, 1.0)
    wait = back_off.seconds(failures, number)
    longest = min(1.0, 0.1 * 2 ** min(failures - 1, 10))
    assert longest / 2 <= wait <= longest
    assert (wait < back_off.seconds(failures, other)) <= (number < other)
    assert back_off.seconds(failures + 1, number) >= wait
