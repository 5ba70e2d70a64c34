"""What a decode worker keeps of one prefill worker."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from vllm_commext.errors import CommextError
from vllm_commext.nixl.decode.heartbeats import PeerKey
from vllm_commext.nixl.decode.loads import Part
from vllm_commext.nixl.decode.peer import Peer
from vllm_commext.nixl.decode.peer_states import BackOff, PeerEvent, PeerState, next_state
from vllm_commext.nixl.wire.inquiry import Inquiry

BACK_OFF = BackOff()


@dataclass
class PeerEntry:
    """One prefill worker.

    Attributes:
        key: what it is asked under.
        state: where it is in its life.
        peer: the connection to read from; kept while suspect, until it is known to have ended.
        inquiry: the question during a handshake; it stays open afterwards, as its connection closes
            with the peer's process.
        asked: when it was asked last, in seconds of ``time.monotonic``, as all times here.
        parts: parts of loads that wait for it.
        wanted_incarnation: start of its engine that the last request was of, "" for any.
        error: why it could not be asked the last time.
        num_failures: handshakes that failed since the last good one.
        retry_at: when it may be asked again.
        last_used: when a request needed it last.
    """

    key: PeerKey
    state: PeerState = PeerState.UNKNOWN
    peer: Peer | None = None
    inquiry: Inquiry | None = None
    asked: float = 0.0
    parts: list[Part] = field(default_factory=list)
    wanted_incarnation: str = ""
    error: CommextError = field(default_factory=CommextError)
    num_failures: int = 0
    retry_at: float = 0.0
    last_used: float = 0.0

    def apply(self, event: PeerEvent) -> None:
        """Go on to the state after an event."""
        self.state = next_state(self.state, event)

    def fail(self, error: CommextError, now: float) -> None:
        """The handshake has failed: the next one has to wait."""
        self.apply(PeerEvent.FAILED)
        self.error = error
        self.num_failures += 1
        self.retry_at = now + BACK_OFF.seconds(self.num_failures, random.random())
        self.close_inquiry()

    def close_inquiry(self) -> None:
        """Close the connection to its side channel; safe to repeat."""
        if self.inquiry is not None:
            self.inquiry.close()
        self.inquiry = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way with it."""
        has_reads = self.peer is not None and self.peer.num_reads > 0
        return self.state != PeerState.HANDSHAKING and not has_reads
