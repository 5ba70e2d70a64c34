"""One prefill worker as a decode worker sees it."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_commext.nixl.decode.links import Link, RefCounted
from vllm_commext.nixl.decode.transfers import Part, Source, Transfer
from vllm_commext.nixl.requests import PeerKey
from vllm_commext.nixl.wire.client import SideChannel


class PeerState(StrEnum):
    """Where a peer is in its life.

    UNKNOWN: nobody has asked for it.
    HANDSHAKING: it has been asked for its description.
    READY: it has described itself and fits: it is read from.
    SUSPECT: a read failed or is late, its connection closed, or it may have been restarted: it is
        asked again before the next read.
    LOST: it did not answer, refused, or does not fit; it is asked again after a while.
    """

    UNKNOWN = "unknown"
    HANDSHAKING = "handshaking"
    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(eq=False)
class Peer:
    """One prefill worker.

    Attributes:
        key: what it is asked under.
        channel: asks it; stays open afterwards, as the connection closes with the peer's process.
        state: where it is in its life.
        link: the connection to read from; kept while suspect, until it is known to have ended.
        reach: of a peer that does not fit, the name of its agent, so that it can be told that its
            blocks will not be read.
        asked: when it was asked last, in seconds of ``time.monotonic``, as all times here.
        waiting: parts of loads that wait for it to be ready, or for room among its reads; first
            come, first served.
        releases: remote requests that it is to be released from as soon as it is ready.
        wanted_incarnation: start of its engine that the last request was of, "" for any.
        last_used: when a request needed it last.
        drains: it has said that it takes no new requests, and will go.
    """

    key: PeerKey
    channel: SideChannel
    state: PeerState = PeerState.UNKNOWN
    link: Link | None = None
    reach: RefCounted | None = None
    asked: float = 0.0
    waiting: deque[Part] = field(default_factory=deque[Part])
    releases: list[tuple[Transfer, Source]] = field(default_factory=list[tuple[Transfer, Source]])
    wanted_incarnation: str = ""
    last_used: float = 0.0
    drains: bool = False

    @property
    def ready_link(self) -> Link | None:
        """The connection to read from, None where it is not ready."""
        return self.link if self.state == PeerState.READY else None

    @property
    def has_closed(self) -> bool:
        """Whether its connection has closed since it was asked, most likely with its process."""
        return self.state == PeerState.SUSPECT and not self.channel.is_open

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way with it."""
        has_reads = self.link is not None and self.link.num_users > 1
        is_wanted = has_reads or bool(self.waiting) or bool(self.releases)
        return self.state != PeerState.HANDSHAKING and not is_wanted

    def doubt(self) -> None:
        """What it was read from may not be there any more."""
        if self.state == PeerState.READY:
            self.state = PeerState.SUSPECT

    def drop_reach(self) -> None:
        """Forget the agent of a peer that does not fit; safe to repeat."""
        reach, self.reach = self.reach, None
        if reach is not None:
            reach.drop()
