"""The prefill engine's scheduler side of chunk streaming: which prompts have a row, and what each
step adds to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_commext.nixl.geometry.layout import FULL
from vllm_commext.nixl.geometry.plan import num_blocks_for
from vllm_commext.nixl.geometry.request_blocks import keeps_every_token
from vllm_commext.nixl.prefill.fence import FenceSlots
from vllm_commext.nixl.prefill.prompt_tracker import Progress, progress_in
from vllm_commext.nixl.reasons import Handover
from vllm_commext.nixl.requests import Chunk, Listed, Restart
from vllm_commext.nixl.stream.directory import StreamDirectory
from vllm_commext.nixl.stream.rows import num_rows_of
from vllm_commext.nixl.stream.streaming import Streaming
from vllm_commext.nixl.wire.messages import FoundStream
from vllm_commext.nixl.wire.params import key_of, params_of
from vllm_commext.nixl.wire.prompt import digests, prompt_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class _Stream:
    """One prompt; ``row`` is -1 before its first step; ``num_blocks``: those that are listed, by
    group."""

    request: Request
    key: str
    row: int = -1
    tag: int = 0
    slot: int = -1
    nonce: int = 0
    num_blocks: dict[int, int] = field(default_factory=dict[int, int])
    is_done: bool = False


class StreamProducer:
    """Prompts that are read while they are computed.

    A request's row is given back together with its fence, when no worker's blocks are read any
    more.

    Args:
        fences: the engine's.
        directory: what its side channel answers.
        streaming: what the engine does.
        num_rows: rows of each worker's progress table; by default as ``rows`` has it.
    """

    def __init__(
        self,
        fences: FenceSlots,
        directory: StreamDirectory,
        streaming: Streaming,
        num_rows: int | None = None,
    ) -> None:
        self._fences = fences
        self._directory = directory
        self._streaming = streaming
        self._has_rest = not keeps_every_token(streaming.groups)
        self._free_rows = list(range(num_rows or num_rows_of(streaming.pieces_per_row)))
        self._streams: dict[str, _Stream] = {}

    def add(self, request: Request, *, ends_well: bool = True) -> Handover:
        """A request has come in whose prompt another engine reads; returns how it will be handed
        over.  Unless it *ends well* nothing of it will be."""
        key = key_of(params_of(request))
        if not key:
            return Handover.NO_KEY
        if self._streaming.refusal:
            return self._streaming.refusal
        how = self._how(request, key) if ends_well else Handover.PROMPT
        if how == Handover.STREAMED:
            self._streams[request.request_id] = _Stream(request, key)
        elif how != Handover.REPEATED_KEY:
            self._directory.open(key, FoundStream(refusal=how.meaning))
        return how

    def _how(self, request: Request, key: str) -> Handover:
        if key in self._directory or any(one.key == key for one in self._streams.values()):
            return Handover.REPEATED_KEY
        if request.prompt_embeds is not None or request.resumable:
            return Handover.PROMPT
        has_room = len(self._streams) < len(self._free_rows) + self._num_begun
        fits = request.num_prompt_tokens <= self._streaming.max_tokens
        return Handover.STREAMED if has_room and fits else Handover.NO_ROOM

    @property
    def _num_begun(self) -> int:
        return sum(one.row >= 0 for one in self._streams.values())

    def row_of(self, request_id: str) -> int:
        """The row that a request has, and with it a fence; -1 for none."""
        found = self._streams.get(request_id)
        return found.row if found is not None else -1

    def take_step(self, step: SchedulerOutput) -> tuple[list[Chunk], list[Restart]]:
        """What the workers must know of a step."""
        preempted = step.preempted_req_ids or ()
        restarts = [self._restart(name) for name in preempted if self.row_of(name) >= 0]
        chunks = (self._advance(progress) for progress in progress_in(step) if self._streams)
        return [chunk for chunk in chunks if chunk is not None], restarts

    def _restart(self, request_id: str) -> Restart:
        stream = self._streams[request_id]
        restart = Restart(stream.row, stream.slot, stream.nonce)
        stream.nonce = self._fences.renew(request_id)
        stream.num_blocks, stream.is_done = {}, False
        self._directory.open(stream.key, self._found(stream))
        return restart

    def _advance(self, progress: Progress) -> Chunk | None:
        stream = self._streams.get(progress.request_id)
        if stream is None or stream.is_done:
            return None
        begins = stream.row < 0
        if begins and not self._begin(stream):
            return None
        num_tokens = stream.request.num_prompt_tokens
        end = min(progress.end, num_tokens)
        listed = tuple(self._listed(stream, progress, num_tokens))
        stream.is_done = end == num_tokens
        return Chunk(stream.row, stream.nonce, listed, end, begins)

    def _listed(
        self, stream: _Stream, progress: Progress, num_tokens: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Blocks that a step adds to the groups whose blocks all stay."""
        if not progress.block_ids:
            return
        streaming = self._streaming
        for number, (group, region) in enumerate(
            zip(streaming.groups, streaming.regions, strict=True)
        ):
            if group.kind != FULL:
                continue
            first = 0 if progress.begins else stream.num_blocks.get(number, 0)
            room = num_blocks_for(num_tokens, group.block_size) - first
            fitting = tuple(progress.block_ids[number][: max(room, 0)])
            stream.num_blocks[number] = first + len(fitting)
            if fitting:
                yield region.place + first, fitting

    def rest_of(self, request_id: str, offered: Sequence[Sequence[int]]) -> Listed:
        """What is to be listed at the end of a prompt that has a row: of the other groups, their
        blocks and how many they are.

        Args:
            request_id: the request.
            offered: the blocks of all groups that are handed over.
        """
        if not self._has_rest or self.row_of(request_id) < 0:
            return ()
        streaming = self._streaming
        return tuple(
            (region.place, (len(ids), *ids))
            for group, region, ids in zip(streaming.groups, streaming.regions, offered, strict=True)
            if group.kind != FULL
        )

    def _begin(self, stream: _Stream) -> bool:
        """Take a fence and a row, and tell who asks."""
        request_id = stream.request.request_id
        fence = self._fences.take(request_id)
        if fence is None:
            del self._streams[request_id]
            self._directory.open(stream.key, FoundStream(refusal=Handover.NO_ROOM.meaning))
            return False
        stream.row = self._free_rows.pop()
        stream.slot, stream.nonce = fence
        stream.tag = stream.nonce
        self._directory.open(stream.key, self._found(stream))
        return True

    def _found(self, stream: _Stream) -> FoundStream:
        request = stream.request
        return FoundStream(
            request_id=request.request_id,
            num_tokens=request.num_prompt_tokens,
            row=stream.row,
            tag=stream.tag,
            fence_slot=stream.slot,
            fence_nonce=stream.nonce,
            prompt=digests(prompt_of(request), request.num_prompt_tokens),
            regions=[region.first for region in self._streaming.regions],
        )

    def tell_token(self, request_id: str, first_token: int, sampling: str) -> None:
        """A prompt is computed, and this token follows, drawn by this."""
        if self.row_of(request_id) >= 0:
            self._directory.tell(self._streams[request_id].key, first_token, sampling)

    def note_finish(self, request_id: str) -> None:
        """A request is computed no more; one that had not begun is forgotten."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.row < 0:
            del self._streams[request_id]
            self._directory.open(stream.key, FoundStream(refusal="the prefill has ended"))

    def withdraw(self, request_id: str) -> None:
        """Who asks for the request is told from now on that it has ended."""
        if self.row_of(request_id) >= 0:
            self._directory.end(self._streams[request_id].key)

    def give_back(self, request_id: str) -> None:
        """All workers have replaced the nonce of the request's fence."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._free_rows.append(stream.row)
            self._directory.end(stream.key)
