"""The decode worker's side: what has a peer's pieces packed, and when.  What proves the blocks is
read after all of them, as with any read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_commext.nixl.gathered.slots import digest_of
from vllm_commext.nixl.gathered.staging import Gathering, Place
from vllm_commext.nixl.geometry.layout import AttentionGeometry, CacheLayout
from vllm_commext.nixl.geometry.plan import Pairs, ReadPlan
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.mapped.gather import Places, num_runs
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS, NixlAgent
from vllm_commext.nixl.transport.posting import NixlReader
from vllm_commext.nixl.transport.tables import RemoteTable
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import SLOTS, StagingOffer, WorkerDescription

SMALL_BYTES = 128 << 10
"""Pieces as long as these NIXL moves as fast by itself, neighbours merged."""
MIN_COMPRESSED_BYTES = 1 << 20
"""Of a read: shorter ones are here before a part would be compressed."""
COMPRESSED_PART_BYTES = 4 << 20
AVOID_SECONDS = 10.0
"""A peer that packs nothing is not asked for as long."""


@dataclass(frozen=True)
class PackingPeer:
    """A prefill worker that packs: its engine, agent and slots, and the table of their words."""

    engine_id: str
    agent_name: str
    offer: StagingOffer
    memory_type: str
    device_id: int
    words: RemoteTable

    @classmethod
    def of(
        cls, name: str, described: WorkerDescription, tables: Mapping[str, RemoteTable]
    ) -> PackingPeer | None:
        """A worker as it describes itself, None where one side packs nothing."""
        if described.staging is None or SLOTS not in tables:
            return None
        memory = described.memory_type, described.device_id
        return cls(described.engine_id, name, described.staging, *memory, tables[SLOTS])


class Words:
    """Looks at the words of a peer's slots, one after the other, by one handle of NIXL's.

    Attributes: ``is_open``: a look is under way.  ``begun``: when the last look was begun, in
        seconds of ``time.monotonic``.
    """

    def __init__(self, agent: NixlAgent, table: RemoteTable, cells: list[int]) -> None:
        self._agent = agent
        self._table = table.own
        self._cells = cells
        self._handle = table.make_read(cells, [0])
        self.is_open = False
        self.begun = 0.0

    @classmethod
    def of(cls, agent: NixlAgent, table: RemoteTable) -> Words | None:
        """None while others have all cells."""
        cells = table.own.take()
        if cells is None:
            return None
        try:
            return cls(agent, table, cells)
        except Exception:
            table.own.give_back(cells)
            raise

    def begin(self) -> None:
        """Begin to look."""
        self.begun = time.monotonic()
        self._agent.post(self._handle)
        self.is_open = True

    def take(self) -> list[int] | None:
        """What the look has found, None while it is under way.

        Raises:
            ConnectionError: it has failed.
        """
        self.is_open = False  # also where NIXL raises
        state = self._agent.state(self._handle)
        if state == IN_PROGRESS:
            self.is_open = True
            return None
        if state != DONE:
            raise ConnectionError(state)
        return self._table.cells[self._cells[0]].tolist()

    def close(self) -> None:
        """Give all back; no look may be under way."""
        self._table.give_back(self._cells)
        self._agent.release_read(self._handle)


def _has_bfloat16(layout: CacheLayout) -> bool:
    shapes = [one.geometry for one in layout.families]
    return any(isinstance(one, AttentionGeometry) and one.dtype == "bfloat16" for one in shapes)


def _compressed_sizes(left: int, most: int) -> Iterator[int]:
    """Bytes of parts of as many in all, none above *most*: so short that one is compressed while
    others are read, and the first and last ones shorter."""
    wanted = min(max(left // 32, MIN_COMPRESSED_BYTES), COMPRESSED_PART_BYTES)
    size, done = min(max(wanted, left // 256), most), 0
    while True:
        now = max(min(size, left // 4, done + size // 4), size // 4)
        yield now
        done, left = done + now, left - now


class GatheredReader:
    """What reads from one prefill worker that packs.

    Args:
        pieces: reads the same by itself.
    """

    def __init__(
        self,
        agent: NixlAgent,
        gathering: Gathering,
        plan: ReadPlan,
        peer: PackingPeer,
        pieces: NixlReader,
    ) -> None:
        self.agent = agent
        self.gathering = gathering
        self.peer = peer
        self.pieces = pieces
        self.local = Places.of(plan.local_rows)
        self.plan_digest = digest_of(plan.remote_rows)
        self.incoming = gathering.incoming(agent)
        self._remote = Places.of(plan.remote_rows)
        self._layout = msgspec.msgpack.encode(plan.local)
        offer = peer.offer
        self._place = Place(offer.address, offer.slot_bytes, offer.num_slots)
        self.part_bytes = min(self._place.slot_bytes, self.incoming.place.slot_bytes)
        longest = int(plan.remote_rows[:, 1].max(initial=0))
        self._is_useful = 0 < longest <= self.part_bytes
        self._compresses = gathering.scratch is not None and _has_bfloat16(plan.local)
        if self._compresses and not offer.compresses:
            logger.warning(
                "wire_compression is not on in %s: nothing is compressed", peer.engine_id
            )
            self._compresses = False
        self.prepared = agent.prepare(
            peer.agent_name, self._place.rows(peer.device_id), peer.memory_type
        )
        self._avoided_until = 0.0
        self._has_told = False

    def look(self) -> Words | None:
        """What looks at the peer's slots, None while others have all cells."""
        return Words.of(self.agent, self.peer.words)

    def compresses(self, pairs: Pairs) -> bool:
        """Whether the peer is to compress what these are."""
        return self._compresses and pairs.num_bytes >= MIN_COMPRESSED_BYTES

    def part_sizes(self, pairs: Pairs) -> Iterator[int]:
        """Bytes of one part after the other, without an end: as long as slots, save where they are
        compressed."""
        if self.compresses(pairs):
            return _compressed_sizes(pairs.num_bytes, self.part_bytes)
        return itertools.repeat(self.part_bytes)

    def suits(self, pairs: Pairs) -> bool:
        """Whether this is faster than NIXL alone: it would have to move many small pieces, or bytes
        that need not be moved."""
        if not self._is_useful or time.monotonic() < self._avoided_until:
            return False
        if self.compresses(pairs):
            return True
        count = num_runs(self.local, self._remote, pairs)
        return count >= self.gathering.min_pieces and pairs.num_bytes < SMALL_BYTES * count

    def introduce(self) -> None:
        """Tell the peer what this worker's numbers mean, once, and let this thread unpack."""
        self.gathering.enter()
        if not self._has_told:
            self.tell(wire.GatherPlan(digest=self.plan_digest, layout=self._layout))
            self._has_told = True

    def tell(self, message: wire.Frame) -> None:
        """Send the peer a message."""
        self.agent.notify(self.peer.agent_name, wire.encode(message))

    def make_read(self, theirs: int, own: int, num_bytes: int) -> Any:
        """Describe a read of a slot's first bytes into one of this worker's."""
        place = self.incoming.place
        return self.agent.make_read(
            self.incoming.prepared,
            place.grains(own, num_bytes),
            self.prepared,
            self._place.grains(theirs, num_bytes),
        )

    def avoid(self) -> None:
        """It packs nothing: leave it in peace for a while, then introduce this worker anew."""
        self._avoided_until = time.monotonic() + AVOID_SECONDS
        self._has_told = False

    def close(self) -> None:
        """Give NIXL's list back; no read may be under way."""
        self.agent.release_list(self.prepared)
