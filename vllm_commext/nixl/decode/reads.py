"""Reads under way: blocks first, then the fence that proves them, until they end or are late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.decode.loads import Part
from vllm_commext.nixl.decode.peer import LocalSide, Peer
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.pauses import pause
from vllm_commext.nixl.transport.posting import Posting, pieces_of_read
from vllm_commext.nixl.wire import messages as wire


@dataclass
class Read:
    """One load's read from one prefill worker.

    Attributes:
        part: what is being loaded.
        peer: where from.
        posting: what NIXL does for it, None between the blocks' end and the fence.
        posted: when it was posted, in seconds of ``time.perf_counter``.
        post_seconds: how long posting took.
        num_bytes: bytes that it copies.
        num_descriptors: descriptors, before NIXL merges neighbours.
        num_merged: descriptors after that, known at the blocks' end.
        cell: where the fence is read into, None before that.
        late: its deadline has passed.
        given_up: its load has been reported as failed, it only has to end.
    """

    part: Part
    peer: Peer
    posting: Posting | None
    posted: float
    post_seconds: float
    num_bytes: int
    num_descriptors: int
    num_merged: int = 0
    cell: int | None = None
    late: bool = False
    given_up: bool = False

    @property
    def is_fenced(self) -> bool:
        """Whether the request's fence is known, so that it can be checked."""
        return self.part.remote.fence_slot >= 0 and self.peer.fence_list is not None


@dataclass(frozen=True)
class End:
    """How a read ended: well, or for one of ``recorder.FAILURE_REASONS`` and what it means."""

    reason: str = ""
    text: str = ""


def release_notification(local: LocalSide, part: Part) -> bytes:
    """What tells a prefill worker that this reader needs the request's blocks no longer."""
    return wire.encode(
        wire.Released(
            request_id=part.remote.request_id,
            consumer=local.consumer,
            num_consumers=part.num_consumers,
        )
    )


class ReadSet:
    """The reads under way on one worker.  Owned by one thread.

    Attributes: ``num_fences``: fences that were posted so far.
    """

    def __init__(self, agent: NixlAgent, recorder: TransferRecorder) -> None:
        self._agent = agent
        self._recorder = recorder
        self._reads: list[Read] = []
        self.num_fences = 0

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._reads)

    def give_up(self, request_id: str) -> None:
        """The request's reads have only to end."""
        for read in self._reads:
            if read.part.load.request_id == request_id:
                read.given_up = True

    def post(self, part: Part, peer: Peer) -> bool:
        """Start a read; False where there is nothing to read.

        Raises:
            ProtocolError: the block lists do not fit each other or the caches, or the fence's slot
                is none of the peer's.
            Exception: what NIXL raises where the read cannot be posted; nothing is under way then.
        """
        load, remote = part.load, part.remote
        if peer.fence_list is not None and remote.fence_slot >= peer.num_fence_slots:
            raise ProtocolError(
                f"kv_transfer_params: expected remote_fence_slot below {peer.num_fence_slots}, got "
                f"{remote.fence_slot}"
            )
        started = time.perf_counter()
        pairs = peer.plan.pairs(
            load.blocks,
            remote.block_ids,
            num_tokens=load.num_tokens,
            num_remote_tokens=remote.num_tokens,
            pause=pause,
        )
        if not len(pairs.local):
            return False
        self._reads.append(self._start(part, peer, pairs, started))
        self._recorder.queued(started - part.begun)
        peer.num_reads += 1
        return True

    def _start(self, part: Part, peer: Peer, pairs: Pairs, started: float) -> Read:
        pieces = pieces_of_read(self._agent, peer.local_list, peer.remote_list, pairs)
        posting = Posting(self._agent, pieces)
        seconds = time.perf_counter() - started
        return Read(part, peer, posting, started, seconds, pairs.num_bytes, len(pairs.local))

    def poll(self) -> Iterator[tuple[Read, End]]:
        """Reads that have ended since the last call."""
        reads, self._reads = self._reads, []
        for read in reads:
            end = self._advance(read)
            if end is None:
                self._reads.append(read)
                continue
            read.peer.num_reads -= 1
            if not end.reason and not read.given_up:
                self._record(read)
            yield read, end

    def take_late(self, limit_seconds: float) -> Iterator[Read]:
        """Reads that have taken longer than ``limit_seconds`` or whose peer is lost, each once."""
        now = time.perf_counter()
        for read in self._reads:
            if not read.late and (read.peer.lost or now - read.posted >= limit_seconds):
                read.late = True
                yield read

    def _advance(self, read: Read) -> End | None:
        """One step of blocks, then fence, then end; None while under way."""
        if read.posting is not None:
            error = read.posting.look()
            if error is None:
                return None
            if read.cell is None:
                read.num_merged = read.posting.num_merged
            read.posting = None
            if error:
                self._take_nonce(read)
                return End("transfer", f"NIXL: {error}")
        nonce = self._take_nonce(read)
        if nonce is not None:
            return self._judge(read, nonce)
        if read.given_up or not read.is_fenced:
            return End()
        return self._post_fence(read)

    def _post_fence(self, read: Read) -> End | None:
        """The blocks have arrived: read the fence, now or as soon as a cell is free."""
        cell = self._agent.board.take_cell()
        if cell is None:
            return None
        read.cell = cell
        try:
            fence = self._agent.make_fence_read(
                read.peer.fence_list, cell, read.part.remote.fence_slot
            )
            read.posting = Posting(self._agent, [fence])
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the read has failed
            self._take_nonce(read)
            return End("transfer", f"NIXL: {error}")
        self.num_fences += 1
        return self._advance(read)  # within a host it has arrived by now

    def _take_nonce(self, read: Read) -> int | None:
        """What has arrived in the read's cell, which is given back; None without a cell."""
        if read.cell is None:
            return None
        nonce, read.cell = self._agent.board.read_cell(read.cell), None
        return nonce

    @staticmethod
    def _judge(read: Read, nonce: int) -> End:
        if nonce == read.part.remote.fence_nonce:
            return End()
        return End(
            "expired",
            "the prefill engine had freed the blocks before they were read: the request came later "
            "than kv_lease_duration, or its parameters were used twice or altered",
        )

    def _record(self, read: Read) -> None:
        self._recorder.transfer(
            seconds=time.perf_counter() - read.posted,
            post_seconds=read.post_seconds,
            num_bytes=read.num_bytes,
            num_blocks=len(read.part.load.block_ids),
            num_descriptors=read.num_descriptors,
            num_merged=read.num_merged,
        )
