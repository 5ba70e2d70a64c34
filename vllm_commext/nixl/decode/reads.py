"""Reads under way: blocks first, then what proves them, until they end or are late."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.decode.transfers import Failure, ShardRead
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.posting import Posting, Reader, pause
from vllm_commext.nixl.transport.tables import RemoteTable
from vllm_commext.nixl.wire.description import FENCES, GENERATIONS

PATIENCE = 4
"""Times ``max_bytes_in_flight``: a read counts as moving along with the others of its link until
these have moved that much since it moved itself."""
FREED = (
    "the prefill engine had freed the blocks before they were read: the request came later than "
    "kv_lease_duration, or its parameters were used twice or altered"
)
USED_AGAIN = (
    "the engine has used some of the blocks again before they were read: they were kept for nobody"
)


class PostingError(Exception):
    """The peer cannot be read now over this link."""


@dataclass(frozen=True)
class Proof:
    """Records of a prefill worker's that change before the blocks do, and are read after them: if
    they are as expected, the blocks were the request's all the while."""

    table: RemoteTable
    records: Sequence[int]
    expected: Sequence[int]
    refutation: str

    def holds(self, cells: Sequence[int]) -> bool:
        return self.table.own.cells[[*cells]].tolist() == [*self.expected]


def proof_of(shard: ShardRead, link: Link) -> Proof | None:
    """Proof by the nonce of the request's fence, or by generations of blocks that are not kept;
    None if the fence is not known; raises ProtocolError."""
    remote, table = shard.remote, link.tables.get(FENCES if shard.remote.is_kept else GENERATIONS)
    if not remote.is_kept:
        return _proof_by_generations(remote, table)
    if remote.fence_slot < 0 or table is None:
        return None
    if remote.fence_slot >= table.num_records:
        raise ProtocolError(
            f"kv_transfer_params: expected remote_fence_slot below {table.num_records}, got "
            f"{remote.fence_slot}"
        )
    nonce = remote.fence_nonce if shard.cursor is None else shard.cursor.nonce
    return Proof(table, [remote.fence_slot], [nonce], FREED)


def _proof_by_generations(remote: RemoteRequest, table: RemoteTable | None) -> Proof:
    if table is None:
        raise ProtocolError(
            f"engine {remote.engine_id!r} offers blocks whose generations cannot be read: set "
            "reuse_blocks in the kv_connector_extra_config of both engines"
        )
    block_ids = [block for group in remote.block_ids for block in group]
    if len(remote.generations) != len(block_ids):
        raise ProtocolError(
            f"expected a generation for each of {len(block_ids)} blocks, got "
            f"{len(remote.generations)}"
        )
    pairs = sorted(zip(block_ids, remote.generations, strict=True))  # neighbours are merged
    records, expected = zip(*pairs, strict=True)
    return Proof(table, records, expected, USED_AGAIN)


@dataclass(eq=False)
class BlockRead:
    """One load's read from one prefill worker; all times in seconds of ``time.perf_counter``.

    Attributes:
        posting: what is done for it, None between the blocks' end and the proof.
        mark: ``link.num_bytes_done`` at that time.
        proof: what is read after the blocks, None for blocks without any.
        is_hidden: it began before the prompt was computed, as far as was known.
    """

    shard: ShardRead
    link: Link
    reader: Reader
    posting: Posting | None
    posted: float
    post_seconds: float
    num_bytes: int
    num_descriptors: int
    progressed: float
    mark: int
    proof: Proof | None
    cells: list[int] | None = None
    is_late: bool = False
    is_hidden: bool = False


@dataclass(frozen=True)
class End:
    """The end of a read; it ended well without a failure."""

    failure: Failure | None = None


def prepare(shard: ShardRead, link: Link) -> Pairs:
    """Plan a shard's copies; raises ProtocolError."""
    load, remote = shard.load, shard.remote
    proof_of(shard, link)
    return link.plan.pairs(
        load.blocks,
        remote.block_ids,
        num_tokens=load.num_tokens,
        num_remote_tokens=remote.num_tokens,
        pause=pause,
    )


def _num_open(posting: Posting | None) -> int:
    return posting.num_open if posting is not None else 0


class ReadSet:
    """The reads under way on one worker.  Owned by one thread.

    Args:
        max_bytes: bytes under way on one link, unless a single read has more.
        limit_seconds: a read that has not moved on for as long is late.
    """

    def __init__(
        self, agent: NixlAgent, recorder: TransferRecorder, max_bytes: int, limit_seconds: float
    ) -> None:
        self._agent = agent
        self._recorder = recorder
        self._max_bytes = max_bytes
        self._limit_seconds = limit_seconds
        self._reads: list[BlockRead] = []
        self.num_proofs = self.num_moves = 0

    def __len__(self) -> int:
        return len(self._reads)

    def under_way(self) -> list[BlockRead]:
        return list(self._reads)

    def has_room(self, pairs: Pairs, link: Link) -> bool:
        return not link.num_bytes or link.num_bytes + pairs.num_bytes <= self._max_bytes

    def post(self, shard: ShardRead, link: Link, pairs: Pairs) -> None:
        """Start a read; raises PostingError."""
        started = time.perf_counter()
        if shard.cursor is None or not shard.cursor.has_read:
            self._recorder.observe(queue_seconds=started - shard.begun)
        reader = link.reader_of(pairs)
        try:
            posting = reader.post(pairs)
        except Exception as error:
            raise PostingError(f"{reader.name}: {error}") from error
        now = time.perf_counter()
        read = BlockRead(
            shard=shard,
            link=link.hold(),
            reader=reader,
            posting=posting,
            posted=started,
            post_seconds=now - started,
            num_bytes=pairs.num_bytes,
            num_descriptors=len(pairs.local),
            progressed=now,
            mark=link.num_bytes_done,
            proof=proof_of(shard, link),
            is_hidden=shard.cursor is not None and not shard.cursor.is_computed,
        )
        if not link.num_bytes:
            link.progressed = now
        link.num_bytes += read.num_bytes
        self._reads.append(read)

    def look(self, read: BlockRead) -> End | None:
        """One step of blocks, then proof, then end; None while under way.  What goes wrong ends
        this read, as soon as nothing of it is under way."""
        posting = read.posting
        num_open = _num_open(posting)
        try:
            end = self._advance(read)
        except Exception as error:  # noqa: BLE001 one read's error is no other's
            if read.posting is not None and read.posting.num_open:
                return None  # looked at again, until it ends or is late
            end = End(Failure("internal", error))
        # Without a posting it waits for cells, which others may never give back.
        has_moved = read.posting is not posting or _num_open(posting) < num_open
        if end is not None or has_moved:
            self.num_moves += 1
            self._note_progress(read)
        if end is not None:
            self._end(read)
        return end

    def record(self, read: BlockRead) -> None:
        self._recorder.observe(
            transfer_seconds=time.perf_counter() - read.posted, post_seconds=read.post_seconds
        )
        self._recorder.count(
            bytes=read.num_bytes,
            hidden_bytes=read.num_bytes * read.is_hidden,
            mapped_bytes=read.num_bytes * read.reader.is_mapped,
            descriptors=read.num_descriptors,
        )

    def take_late(self) -> list[BlockRead]:
        """Reads that do not move on, or whose peer is lost, each told once; the link's room is for
        others from now on."""
        now = time.perf_counter()
        late = [read for read in self._reads if not read.is_late and self._is_stuck(read, now)]
        for read in late:
            read.is_late = True
            read.link.num_bytes -= read.num_bytes
        return late

    def _is_stuck(self, read: BlockRead, now: float) -> bool:
        link, moved = read.link, read.progressed
        if link.num_bytes_done - read.mark <= PATIENCE * self._max_bytes:
            moved = max(moved, link.progressed)
        return link.closed or now - moved >= self._limit_seconds

    def _note_progress(self, read: BlockRead) -> None:
        read.link.progressed = read.progressed = time.perf_counter()
        read.mark = read.link.num_bytes_done

    def _end(self, read: BlockRead) -> None:
        self._reads.remove(read)
        link = read.link
        link.num_bytes_done += read.num_bytes
        if not read.is_late:
            link.num_bytes -= read.num_bytes
        if read.proof is not None and read.cells is not None:
            read.proof.table.own.give_back(read.cells)
            read.cells = None
        link.drop()

    def _advance(self, read: BlockRead) -> End | None:
        if read.posting is not None:
            error = read.posting.look()
            if error is None:
                return None
            name = read.reader.name if read.cells is None else "NIXL"
            read.posting = None
            if error:
                return End(Failure("transfer", ProtocolError(f"{name}: {error}")))
        proof = read.proof
        if proof is None:
            return End()
        if read.cells is not None:
            expired = Failure("expired", ProtocolError(proof.refutation))
            return End(None if proof.holds(read.cells) else expired)
        return End() if read.shard.use.is_given_up else self._post_proof(read, proof)

    def _post_proof(self, read: BlockRead, proof: Proof) -> End | None:
        cells = proof.table.own.take(len(proof.records))
        if cells is None:
            return None
        read.cells = cells
        try:
            read.posting = Posting(self._agent, [proof.table.make_read(cells, proof.records)])
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the read has failed
            return End(Failure("transfer", ProtocolError(f"NIXL: {error}")))
        self.num_proofs += 1
        return self._advance(read)  # within a host it has arrived by now


SPLIT_DESCRIPTORS = 1024
"""Descriptors of a read from which on NIXL shares it out, where ``split_batch_size`` is not set."""
NUM_ROUNDS = 7
"""Reads after a removal: idle workers take shares as they wake up, and where cores are busy one may
miss several rounds while the others take its shares."""
ROUND_SECONDS = 0.1
"""From one round to the next at least, so that loads do not wait for several of them; twice as long
after each round since the removal, so that some come when the cores are less busy."""


def num_descriptors(config: ConnectorConfig) -> int:
    if "UCX" not in config.backends:
        return 0
    split = int(config.backend_params.get("split_batch_size", SPLIT_DESCRIPTORS))
    return config.num_threads * max(1, split)


class Sweeper:
    """Lets NIXL's worker threads finish with peers that were removed.  Owned by one thread.

    With ``num_threads``, NIXL's UCX backend has a connection a worker thread to each peer.
    Removing a peer only begins to close them: a worker goes on with that when it next takes part in
    a read, which it does only where the read has many descriptors.  Until then the sockets of a
    peer that has died stay open.  So after a removal another peer's first nonce is read ``count``
    times over, so that every worker gets a share.
    """

    def __init__(self, agent: NixlAgent, count: int) -> None:
        self._agent = agent
        self._count = count
        self._num_due = 0
        self._last_round = -math.inf
        self._link: Link | None = None
        self._posting: Posting | None = None
        # A cell of its own for good: reads that have failed may write late.
        self._cell: list[int] | None = None

    @property
    def is_reading(self) -> bool:
        return self._link is not None

    @property
    def is_due(self) -> bool:
        return self._num_due > 0

    @property
    def _next_round(self) -> float:
        return self._last_round + ROUND_SECONDS * 2 ** (NUM_ROUNDS - self._num_due)

    def note_removal(self) -> None:
        self._num_due = NUM_ROUNDS if self._count else 0

    def poll(self, links: Sequence[Link]) -> Link | None:
        """Look at the read under way, or begin one over the youngest link, which is the last.

        Returns:
            A link that could not be read.
        """
        now = time.monotonic()
        if self._link is None and self._num_due and now >= self._next_round:
            self._last_round = now
            self._begin(links)
        if self._link is None:
            return None
        error = self._look()
        if error is None:
            return None
        link, self._link, self._posting = self._link, None, None
        link.drop()
        self._num_due -= not error
        return link if error else None

    def _begin(self, links: Sequence[Link]) -> None:
        link = next((one for one in reversed(links) if FENCES in one.tables), None)
        if link is None:
            return
        self._cell = self._cell or link.tables[FENCES].own.take()
        if self._cell is not None:
            self._link = link.hold()

    def _look(self) -> str | None:
        assert self._link is not None  # a read is under way or to be posted
        assert self._cell is not None
        try:
            if self._posting is None:
                fences, times = self._link.tables[FENCES], self._count
                read = fences.make_read(times * self._cell, times * [0])
                self._posting = Posting(self._agent, [read])
            return self._posting.look()
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer cannot be read
            return str(error) or type(error).__name__
