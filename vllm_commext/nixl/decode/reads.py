"""Reads under way: blocks first, then the fence that proves them, until they end or are late.

Blocks that are kept for nobody are proven by their generations in the fence's place.
"""

import time
from dataclasses import dataclass, field

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.decode.transfers import Failure, Part
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.reuse.generations import GenerationTable
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.pauses import pause
from vllm_commext.nixl.transport.posting import Posting, Reader

PATIENCE = 4
"""A read counts as moving along with the others of its link until these have moved so many times
``max_bytes_in_flight`` since it moved itself."""


class PostingError(Exception):
    """The peer cannot be read now, over this link; says by what and why."""


@dataclass(eq=False)
class Read:
    """One load's read from one prefill worker; all times in seconds of ``time.perf_counter``.

    Attributes:
        part: what is being loaded.
        link: where from; held until the read has ended.
        reader: what reads the blocks; the fence is read by NIXL.
        posting: what is done for it, None between the blocks' end and the fence.
        posted: when it was posted.
        post_seconds: how long posting took.
        num_bytes: bytes that it copies.
        num_descriptors: descriptors, before NIXL merges neighbours.
        progressed: when a piece of it last ended.
        mark: ``link.num_bytes_done`` at that time.
        num_merged: descriptors after merging, known at the blocks' end.
        cell: where the fence is read into, None before that.
        cells: where generations are read into, rather.
        is_late: it has not moved on for too long.
        is_hidden: it began before the prompt was computed, as far as was known.
    """

    part: Part
    link: Link
    reader: Reader
    posting: Posting | None
    posted: float
    post_seconds: float
    num_bytes: int
    num_descriptors: int
    progressed: float
    mark: int
    num_merged: int = 0
    cell: int | None = None
    cells: list[int] = field(default_factory=list[int])
    is_late: bool = False
    is_hidden: bool = False

    @property
    def is_fenced(self) -> bool:
        """Whether the request's fence is known, so that it can be checked."""
        remote = self.part.remote
        return not remote.is_kept or (remote.fence_slot >= 0 and self.link.fence_list is not None)

    @property
    def is_being_proven(self) -> bool:
        """Whether the fence or the generations are being read, or have been."""
        return self.cell is not None or bool(self.cells)


@dataclass(frozen=True)
class End:
    """How a read ended: well, or with a failure."""

    failure: Failure | None = None


def prepare(part: Part, link: Link) -> Pairs:
    """What a part copies.

    Raises:
        ProtocolError: the block lists do not fit each other or the caches, or the fence's slot is
            none of the peer's.
    """
    load, remote = part.load, part.remote
    if link.fence_list is not None and remote.fence_slot >= link.num_fence_slots:
        raise ProtocolError(
            f"kv_transfer_params: expected remote_fence_slot below {link.num_fence_slots}, got "
            f"{remote.fence_slot}"
        )
    if not remote.is_kept:
        _check_generations(remote, link)
    return link.plan.pairs(
        load.blocks,
        remote.block_ids,
        num_tokens=load.num_tokens,
        num_remote_tokens=remote.num_tokens,
        pause=pause,
    )


def _num_open(posting: Posting | None) -> int:
    return posting.num_open if posting is not None else 0


def _check_generations(remote: RemoteRequest, link: Link) -> None:
    """Refuse what could not be proven.

    Raises:
        ProtocolError: the peer's worker has no generations, or they are not one a block.
    """
    if link.generation_list is None:
        raise ProtocolError(
            f"engine {remote.engine_id!r} offers blocks whose generations cannot be read: set "
            "reuse_blocks in the kv_connector_extra_config of both engines"
        )
    num_blocks = sum(map(len, remote.block_ids))
    if len(remote.generations) != num_blocks:
        raise ProtocolError(
            f"expected a generation for each of {num_blocks} blocks, got {len(remote.generations)}"
        )


class ReadSet:
    """The reads under way on one worker.  Owned by one thread.

    Attributes: ``num_fences``: fences that were posted so far.

    Args:
        agent: whose reads they are.
        recorder: where timings go.
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
        self._reads: list[Read] = []
        self.num_fences = 0

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._reads)

    def under_way(self) -> list[Read]:
        """The reads, in the order in which they were posted."""
        return list(self._reads)

    def has_room(self, pairs: Pairs, link: Link) -> bool:
        """Whether a read may be posted now: the first one on a link always may."""
        return not link.num_bytes or link.num_bytes + pairs.num_bytes <= self._max_bytes

    def post(self, part: Part, link: Link, pairs: Pairs) -> None:
        """Start a read.

        Raises:
            PostingError: it cannot be posted; nothing is under way then.
        """
        started = time.perf_counter()
        if part.stream is None or not part.stream.has_read:
            self._recorder.observe(queue_seconds=started - part.begun)
        reader = link.reader_of(pairs)
        try:
            posting = reader.post(pairs)
        except Exception as error:
            raise PostingError(f"{reader.name}: {error}") from error
        now = time.perf_counter()
        read = Read(
            part=part,
            link=link.hold(),
            reader=reader,
            posting=posting,
            posted=started,
            post_seconds=now - started,
            num_bytes=pairs.num_bytes,
            num_descriptors=len(pairs.local),
            progressed=now,
            mark=link.num_bytes_done,
            is_hidden=part.stream is not None and not part.stream.is_computed,
        )
        if not link.num_bytes:
            link.progressed = now
        link.num_bytes += read.num_bytes
        self._reads.append(read)

    def look(self, read: Read) -> End | None:
        """One step of blocks, then fence, then end; None while under way.  What goes wrong ends
        this read, as soon as nothing of it is under way."""
        posting = read.posting
        num_open = _num_open(posting)
        try:
            end = self._advance(read)
        except Exception as error:  # noqa: BLE001 one read's error is no other's
            if read.posting is not None and read.posting.num_open:
                return None  # looked at again, until it ends or is late
            end = End(Failure("internal", error))
        # Without a posting it waits for a cell, which others may never give back.
        has_moved = read.posting is not posting or _num_open(posting) < num_open
        if end is not None or has_moved:
            self._note_progress(read)
        if end is not None:
            self._end(read)
        return end

    def record(self, read: Read) -> None:
        """Note the figures of a read that has ended well."""
        self._recorder.observe(
            transfer_seconds=time.perf_counter() - read.posted, post_seconds=read.post_seconds
        )
        self._recorder.count(
            bytes=read.num_bytes,
            hidden_bytes=read.num_bytes * read.is_hidden,
            mapped_bytes=read.num_bytes * read.reader.is_mapped,
            descriptors=read.num_descriptors,
            merged_descriptors=read.num_merged,
        )

    def take_late(self) -> list[Read]:
        """Reads that do not move on, or whose peer is lost, each told once; the link's room is for
        others from now on."""
        now = time.perf_counter()
        late = [read for read in self._reads if not read.is_late and self._is_stuck(read, now)]
        for read in late:
            read.is_late = True
            read.link.num_bytes -= read.num_bytes
        return late

    def _is_stuck(self, read: Read, now: float) -> bool:
        link, moved = read.link, read.progressed
        if link.num_bytes_done - read.mark <= PATIENCE * self._max_bytes:
            moved = max(moved, link.progressed)
        return link.lost or now - moved >= self._limit_seconds

    def _note_progress(self, read: Read) -> None:
        read.link.progressed = read.progressed = time.perf_counter()
        read.mark = read.link.num_bytes_done

    def _end(self, read: Read) -> None:
        """Give back what the read held."""
        self._reads.remove(read)
        link = read.link
        link.num_bytes_done += read.num_bytes
        if not read.is_late:
            link.num_bytes -= read.num_bytes
        if read.cell is not None:
            self._agent.fences.give_back_cell(read.cell)
            read.cell = None
        if read.cells:
            self._generations.give_back_cells(read.cells)
            read.cells = []
        link.drop()

    def _advance(self, read: Read) -> End | None:
        if read.posting is not None:
            error = read.posting.look()
            if error is None:
                return None
            name = "NIXL"
            if not read.is_being_proven:
                read.num_merged, name = read.posting.num_merged, read.reader.name
            read.posting = None
            if error:
                return End(Failure("transfer", ProtocolError(f"{name}: {error}")))
        if read.cell is not None:
            return self._judge(read, self._agent.fences.nonce_in(read.cell))
        if read.cells:
            return self._judge_generations(read)
        if read.part.use.is_given_up or not read.is_fenced:
            return End()
        return self._post_fence(read)

    def _post_fence(self, read: Read) -> End | None:
        """The blocks have arrived: read the fence, now or as soon as a cell is free."""
        if not read.part.remote.is_kept:
            return self._post_generations(read)
        cell = self._agent.fences.take_cell()
        if cell is None:
            return None
        read.cell = cell
        try:
            fence = self._agent.make_fence_read(
                read.link.fence_list, cell, read.part.remote.fence_slot
            )
            read.posting = Posting(self._agent, [fence])
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the read has failed
            return End(Failure("transfer", ProtocolError(f"NIXL: {error}")))
        self.num_fences += 1
        return self._advance(read)  # within a host it has arrived by now

    def _post_generations(self, read: Read) -> End | None:
        """The same for blocks that are kept for nobody."""
        block_ids = sorted(block for group in read.part.remote.block_ids for block in group)
        cells = self._generations.take_cells(len(block_ids))
        if cells is None:
            return None
        read.cells = cells
        try:
            generations = self._agent.make_generations_read(
                read.link.generation_list, cells, block_ids
            )
            read.posting = Posting(self._agent, [generations])
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the read has failed
            return End(Failure("transfer", ProtocolError(f"NIXL: {error}")))
        self.num_fences += 1
        return self._advance(read)

    def _judge_generations(self, read: Read) -> End:
        remote = read.part.remote
        ids = [block for group in remote.block_ids for block in group]
        pairs = sorted(zip(ids, remote.generations, strict=True))
        if self._generations.have(read.cells, [generation for _, generation in pairs]):
            return End()
        text = (
            "the engine has used some of the blocks again before they were read: they were kept "
            "for nobody"
        )
        return End(Failure("expired", ProtocolError(text)))

    @property
    def _generations(self) -> GenerationTable:
        assert self._agent.generations is not None  # links have lists of generations only with one
        return self._agent.generations

    @staticmethod
    def _judge(read: Read, nonce: int) -> End:
        if nonce == read.part.nonce:
            return End()
        text = (
            "the prefill engine had freed the blocks before they were read: the request came later "
            "than kv_lease_duration, or its parameters were used twice or altered"
        )
        return End(Failure("expired", ProtocolError(text)))
