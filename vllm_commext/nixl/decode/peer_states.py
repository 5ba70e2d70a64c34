"""The life of a prefill worker as a decode worker sees it: states, events, and the way from one to
the next.

Pure: whoever owns a peer brings the events, and acts on the states.

    unknown      nobody has asked for it
    handshaking  it has been asked for its description
    ready        it is read from
    suspect      a read failed or is late, its connection closed, or it may have been restarted: it
                 is asked again before the next read
    lost         it could not be asked; it is asked again after a while
    retired      not to be used again; NIXL forgets it as soon as no read of it is under way
"""

from collections.abc import Mapping
from enum import Enum, StrEnum


class PeerState(StrEnum):
    """Where a peer is in its life."""

    UNKNOWN = "unknown"
    HANDSHAKING = "handshaking"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    RETIRED = "retired"


class PeerEvent(Enum):
    """What happens to a peer.

    NEEDED: a request is to be read from it, or its life is to be proven.
    ANSWERED: it has described itself and fits.
    FAILED: it did not answer, refused, or does not fit.
    DOUBTED: a read failed or is late, its connection closed, or a request knows of another start.
    UNUSED: nobody has needed it for long, its place is needed, or this worker ends.
    """

    NEEDED = "needed"
    ANSWERED = "answered"
    FAILED = "failed"
    DOUBTED = "doubted"
    UNUSED = "unused"


_CHANGES: Mapping[tuple[PeerState, PeerEvent], PeerState] = {
    (PeerState.UNKNOWN, PeerEvent.NEEDED): PeerState.HANDSHAKING,
    (PeerState.HANDSHAKING, PeerEvent.ANSWERED): PeerState.READY,
    (PeerState.HANDSHAKING, PeerEvent.FAILED): PeerState.LOST,
    (PeerState.READY, PeerEvent.DOUBTED): PeerState.SUSPECT,
    (PeerState.SUSPECT, PeerEvent.NEEDED): PeerState.HANDSHAKING,
    (PeerState.LOST, PeerEvent.NEEDED): PeerState.HANDSHAKING,
    **{(state, PeerEvent.UNUSED): PeerState.RETIRED for state in PeerState},
}


def next_state(state: PeerState, event: PeerEvent) -> PeerState:
    """The state after an event; the same one where the event means nothing in it."""
    return _CHANGES.get((state, event), state)
