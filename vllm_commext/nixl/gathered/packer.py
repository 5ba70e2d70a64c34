"""The prefill worker's side: packs parts of reads into its slots, as readers ask for them.

A reader draws a ticket and asks for all parts of a read at once, each given by its descriptors.
They are packed in turn, as slots are free; the word of a slot is written when its part is packed,
and taken away before anything else is packed there.  The reader says which parts it has taken; one
that says nothing for a while is forgotten.

What is asked for is checked before it is packed: the fence must still have the request's nonce, the
blocks must be the request's, and all addresses follow from this worker's own layout.  That the
blocks stayed the request's meanwhile is for the reader to prove, by the fence, as with any read.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.nixl.gathered.compression import Stepwise, compress
from vllm_commext.nixl.gathered.slots import Descriptors, begins_of, digest_of, word_of
from vllm_commext.nixl.gathered.staging import Gathering, Place
from vllm_commext.nixl.geometry.layout import CacheLayout, check_layout
from vllm_commext.nixl.geometry.plan import plan_read
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.mapped.gather import MAX_PIECES, Places, Region, mapped_rows
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.transport.posting import Posting
from vllm_commext.nixl.wire.messages import (
    MAX_NOTIFICATION_BYTES,
    MAX_PARTS,
    GatherAsk,
    GatherMessage,
    GatherPlan,
    decode,
)

if TYPE_CHECKING:
    from vllm_commext.nixl.decode.links import LocalWorker

MAX_TICKETS = 64
MAX_WAITING = 4 * MAX_PARTS
MAX_PLANS = 64
"""Of readers that are known at a time; the one that was needed least recently makes room."""
WAIT_SECONDS, SOON_WAIT_SECONDS, SOON_SECONDS = 1e-3, 2e-4, 0.1
"""Between two looks for asks, and for as long after one as others are likely to follow."""
SILENT_SECONDS = 1.0
"""A ticket is forgotten when its reader has said nothing, and nothing was packed, for as long."""
_LAYOUT = msgspec.msgpack.Decoder(CacheLayout)
Mask = npt.NDArray[np.bool_]


@dataclass(eq=False)
class _Ticket:
    """A read: who asks for it, which of its parts are to be packed, when something last moved."""

    ask: GatherAsk
    waiting: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])
    allowed: Mask | None = None
    moved: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Slot:
    """What is in a slot: a part of a ticket's read, or nothing; ``posting`` while it is packed."""

    ticket: int = 0
    part: int = 0
    posting: Posting | Stepwise | None = None

    @property
    def is_free(self) -> bool:
        return not self.ticket and self.posting is None


class Packer:
    """Packs for readers.  Owned by one thread.

    Args:
        local: the worker, with its staging memory and its tables.
    """

    def __init__(self, local: LocalWorker, recorder: TransferRecorder) -> None:
        self._local = local
        self._recorder = recorder
        self._plans: OrderedDict[bytes, Descriptors] = OrderedDict()
        self._tickets: dict[int, _Ticket] = {}
        offer = local.gathering.offer if local.gathering is not None else None
        self._place = Place(0, 0, 0)
        if offer is not None:
            self._place = Place(offer.address, offer.slot_bytes, offer.num_slots)
        self._slots = [_Slot() for _ in range(self._place.num_slots)]
        self._asked = 0.0
        self._log = RateLimitedLog()

    def __len__(self) -> int:
        """Reads that are packed for, and slots that are still packed for nobody."""
        return len(self._tickets) or self.num_packing

    @property
    def is_on(self) -> bool:
        """Whether readers may ask."""
        return bool(self._slots)

    @property
    def has_rows(self) -> bool:
        """Whether asks may come for prompts that are still computed, of which nothing is held."""
        progress = self._local.tables.progress
        return self.is_on and progress is not None and progress.is_in_use

    @property
    def wait_seconds(self) -> float:
        """Until the next look for asks, while they may come."""
        is_soon = time.monotonic() - self._asked < SOON_SECONDS
        return SOON_WAIT_SECONDS if is_soon else WAIT_SECONDS

    @property
    def num_packing(self) -> int:
        """Slots that are being packed."""
        return sum(slot.posting is not None for slot in self._slots)

    def take(self, message: GatherMessage) -> None:
        """What a reader has said.

        Raises:
            ProtocolError: it is refused.
        """
        if not self.is_on:
            raise ProtocolError("expected no asks for packed pieces: gathered_reads is off here")
        if isinstance(message, GatherPlan):
            self._take_plan(message)
        elif isinstance(message, GatherAsk):
            self._take_ask(message)
        elif message.ticket in self._tickets:
            self._tickets[message.ticket].moved = time.monotonic()
            self._free(message.ticket, None if message.ends else set(message.parts))

    def _take_plan(self, told: GatherPlan) -> None:
        layout = decode(_LAYOUT, told.layout, MAX_NOTIFICATION_BYTES, "reader's layout")
        check_layout(layout)
        try:
            plan = plan_read(layout, self._local.layout, local_device=0, remote_device=0)
            own = [Region(*one, one[0]) for one in self._gathering.regions]
            rows = mapped_rows(plan.remote_rows, own)
        except CommextError as error:
            raise ProtocolError(f"a reader's layout: {error}") from error
        if not len(rows) or digest_of(rows) != told.digest:
            raise ProtocolError("expected a reader that plans as this worker does: same release?")
        self._plans[told.digest] = Descriptors(Places.of(rows), plan.sections)
        self._plans.move_to_end(told.digest)
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)

    def _take_ask(self, ask: GatherAsk) -> None:
        num_parts = sum(len(one.waiting) for one in self._tickets.values()) + len(ask.parts)
        num_tickets = len(self._tickets) + (ask.ticket not in self._tickets)
        last = ask.first + len(ask.parts)
        if num_parts > MAX_WAITING or num_tickets > MAX_TICKETS or last > MAX_PARTS:
            raise ProtocolError(
                f"expected at most {MAX_WAITING} parts of {MAX_TICKETS} reads, got {num_parts} of "
                f"{num_tickets}"
            )
        known = self._tickets.setdefault(ask.ticket, _Ticket(ask))
        if msgspec.structs.replace(ask, first=0, parts=[]) != msgspec.structs.replace(
            known.ask, first=0, parts=[]
        ):
            raise ProtocolError("expected one request a ticket, got another one")
        known.waiting += enumerate(ask.parts, ask.first)
        self._asked = time.monotonic()

    def poll(self, held: Callable[[str], Hold | None]) -> None:
        """Go on with what was asked for.

        Args:
            held: a request whose blocks are kept, by what notifications call it.
        """
        if not len(self):
            return
        self._gathering.enter()
        self._look_at_slots()
        now = time.monotonic()
        for name, ticket in list(self._tickets.items()):
            try:
                self._pack_for(name, ticket, held)
            except ProtocolError as error:
                self._refuse(name, error)
            if now - ticket.moved >= SILENT_SECONDS:
                self._free(name, None)

    def _look_at_slots(self) -> None:
        for number, slot in enumerate(self._slots):
            self._look(number, slot)

    def _look(self, number: int, slot: _Slot) -> None:
        """Say that a slot is packed as soon as it is."""
        if slot.posting is None or (error := slot.posting.look()) is None:
            return
        level = slot.posting.level if isinstance(slot.posting, Stepwise) else 0
        slot.posting = None
        if error and slot.ticket:
            self._refuse(slot.ticket, ProtocolError(f"packing failed: {error}"))
        elif slot.ticket in self._tickets:
            self._tickets[slot.ticket].moved = time.monotonic()
            self._gathering.words[0, number] = word_of(slot.ticket, slot.part, level)

    def _pack_for(self, name: int, ticket: _Ticket, held: Callable[[str], Hold | None]) -> None:
        """Pack what there are slots for; what is packed meanwhile is said at once."""
        plan = self._plans.get(ticket.ask.plan)
        if plan is None:
            return  # it may come behind the ask
        while ticket.waiting and (number := self._free_slot()) is not None:
            allowed = self._allowed(ticket, held)
            if allowed is None:
                return  # as may the scheduler's word
            self._plans.move_to_end(ticket.ask.plan)
            part, content = ticket.waiting.popleft()
            slot = self._slots[number]
            slot.posting = self._pack(number, plan, content, allowed, ticket.ask.compressed)
            slot.ticket, slot.part, ticket.moved = name, part, time.monotonic()
            self._look_at_slots()
            if name not in self._tickets:
                return

    def _free_slot(self) -> int | None:
        return next((number for number, slot in enumerate(self._slots) if slot.is_free), None)

    def _allowed(self, ticket: _Ticket, held: Callable[[str], Hold | None]) -> Mask | None:
        """Which blocks are the request's, None where that is not known yet.

        Raises:
            ProtocolError: it has none any more.
        """
        ask, tables = ticket.ask, self._local.tables
        nonces = tables.fences.nonces
        if not 0 <= ask.fence_slot < len(nonces) or int(nonces[ask.fence_slot]) != ask.nonce:
            raise ProtocolError("expected a request whose blocks are kept")
        if ticket.allowed is None:
            block_ids = None
            if ask.row >= 0:
                block_ids = tables.ids_in_row(ask.row, ask.nonce)
            elif (hold := held(ask.request_id)) is not None and hold.fence_slot == ask.fence_slot:
                block_ids = hold.block_ids
            if block_ids is not None:
                ticket.allowed = np.zeros(self._local.layout.num_blocks, dtype=bool)
                ticket.allowed[np.asarray(block_ids, dtype=np.int64)] = True
        return ticket.allowed

    def _pack(
        self, number: int, plan: Descriptors, content: bytes, allowed: Mask, compressed: bool
    ) -> Posting | Stepwise:
        """Begin to pack a part.

        Raises:
            ProtocolError: it does not fit a slot, or has blocks of others.
        """
        if len(content) % 4 or len(content) > 4 * MAX_PIECES:
            raise ProtocolError(f"expected up to {MAX_PIECES} numbers, got {len(content)} bytes")
        blocks, sources, lengths = plan.at(np.frombuffer(content, dtype="<i4"))
        if not allowed[blocks].all():
            raise ProtocolError("expected blocks of the request, got others")
        begins = begins_of(lengths)
        if begins[-1] > self._place.slot_bytes:
            raise ProtocolError(
                f"expected at most {self._place.slot_bytes} bytes in a part, got {begins[-1]}"
            )
        gathering = self._gathering
        if compressed and gathering.scratch is not None:
            slot = gathering.slot(self._place, number)
            return Stepwise(compress(gathering, sources, begins, lengths, slot))
        return gathering.copy(sources, self._place.slot(number) + begins[:-1], lengths)

    def _free(self, name: int, parts: set[int] | None) -> None:
        """A ticket's parts have been read, or with None it is to be forgotten."""
        for number, slot in enumerate(self._slots):
            if slot.ticket == name and (parts is None or slot.part in parts):
                self._gathering.words[0, number] = slot.ticket = 0
        if parts is None:
            self._tickets.pop(name, None)

    def _refuse(self, name: int, error: ProtocolError) -> None:
        """The reader notices that nothing comes."""
        self._free(name, None)
        self._recorder.count(unmatched_notifications=1)
        self._log.warning("gather", f"refused to pack pieces for a reader: {error}")

    @property
    def _gathering(self) -> Gathering:
        assert self._local.gathering is not None  # else nothing is taken
        return self._local.gathering
