"""The prefill engine's scheduler side of chunk streaming: which prompts have a row, and what each
step adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.nixl.geometry.plan import num_blocks_for
from vllm_commext.nixl.prefill.fence import FenceSlots
from vllm_commext.nixl.prefill.prompt_tracker import Progress, progress_in
from vllm_commext.nixl.requests import Chunk, Restart
from vllm_commext.nixl.stream.directory import StreamDirectory
from vllm_commext.nixl.stream.rows import NUM_ROWS
from vllm_commext.nixl.stream.ways import NO_KEY, NO_ROOM, PROMPT, REPEATED_KEY, STREAMED, Streaming
from vllm_commext.nixl.wire.messages import FoundStream
from vllm_commext.nixl.wire.params import key_of
from vllm_commext.nixl.wire.prompt import digests, prompt_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_REFUSALS = {
    NO_ROOM: "all rows for streams are taken, or the prompt does not fit one",
    REPEATED_KEY: "another request has the key",
    PROMPT: "prompts of this kind are not streamed",
}


@dataclass
class _Stream:
    """One prompt; ``row`` is -1 before its first step."""

    request: Request
    key: str
    row: int = -1
    tag: int = 0
    slot: int = -1
    nonce: int = 0
    num_blocks: int = 0
    is_done: bool = False


class StreamProducer:
    """Prompts that are read while they are computed.

    A request's row is given back together with its fence, when no worker's blocks are read any
    more.

    Args:
        fences: the engine's.
        directory: what its side channel answers.
        streaming: what the engine does.
        num_rows: rows of each worker's progress table.
    """

    def __init__(
        self,
        fences: FenceSlots,
        directory: StreamDirectory,
        streaming: Streaming,
        num_rows: int = NUM_ROWS,
    ) -> None:
        self._fences = fences
        self._directory = directory
        self._streaming = streaming
        self._block_size = streaming.block_size
        self._free_rows = list(range(num_rows))
        self._streams: dict[str, _Stream] = {}

    def add(self, request: Request) -> str:
        """A request has come in whose prompt another engine reads; the way it goes, one of
        ``ways.WAYS``."""
        key = key_of(request.kv_transfer_params)
        if not key:
            return NO_KEY
        if self._streaming.refusal:
            return self._streaming.refusal
        way = self._way_of(request, key)
        if way == STREAMED:
            self._streams[request.request_id] = _Stream(request, key)
        elif way != REPEATED_KEY:
            self._directory.open(key, FoundStream(refusal=_REFUSALS[way]))
        return way

    def _way_of(self, request: Request, key: str) -> str:
        if key in self._directory or any(one.key == key for one in self._streams.values()):
            return REPEATED_KEY
        if request.prompt_embeds is not None or request.resumable:
            return PROMPT
        num_blocks = num_blocks_for(request.num_prompt_tokens, self._block_size)
        has_room = len(self._streams) < len(self._free_rows) + self._num_begun
        return STREAMED if has_room and num_blocks <= self._streaming.max_blocks else NO_ROOM

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
        stream.num_blocks, stream.is_done = 0, False
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
        block_ids = progress.block_ids[0] if progress.block_ids else []
        first = 0 if progress.begins else stream.num_blocks
        fitting = tuple(block_ids[: num_blocks_for(num_tokens, self._block_size) - first])
        stream.num_blocks = first + len(fitting)
        stream.is_done = end == num_tokens
        return Chunk(stream.row, stream.nonce, first, fitting, end, begins)

    def _begin(self, stream: _Stream) -> bool:
        """Take a fence and a row, and tell who asks."""
        request_id = stream.request.request_id
        fence = self._fences.take(request_id)
        if fence is None:
            del self._streams[request_id]
            self._directory.open(stream.key, FoundStream(refusal=_REFUSALS[NO_ROOM]))
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
        )

    def note_finish(self, request_id: str) -> None:
        """A request is computed no more; one that had not begun is forgotten."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.row < 0:
            del self._streams[request_id]
            self._directory.open(stream.key, FoundStream(refusal="the prefill has ended"))

    def give_back(self, request_id: str) -> None:
        """All workers have replaced the nonce of the request's fence."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._free_rows.append(stream.row)
            self._directory.end(stream.key)
