"""The prefill engine's scheduler side of chunk streaming: which prompts have a row, what each step
adds to them, and what its side channel answers about them: by key, where a prompt is read, and
which token follows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_commext.errors import Reason
from vllm_commext.nixl.geometry.layout import FULL
from vllm_commext.nixl.geometry.plan import keeps_every_token, num_blocks_for
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.prefill.fence import FenceSlots
from vllm_commext.nixl.prefill.prefill_state import (
    PrefillPhase,
    PrefillState,
    Progress,
    Stream,
    progress_in,
)
from vllm_commext.nixl.requests import Chunk, Listed, Restart
from vllm_commext.nixl.stream.progress import num_rows_of
from vllm_commext.nixl.wire.messages import FoundStream
from vllm_commext.nixl.wire.params import key_of, params_of
from vllm_commext.nixl.wire.prompt import digests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_commext.nixl.engine_context import Streaming


class Handover(Reason):
    """The way in which a request's KV cache is handed over, with its reason."""

    STREAMED = "streamed", "by chunks, while the prompt is computed"
    NO_KEY = "no_key", "its router gave no key"
    OFF = "off", "this engine does not do: set stream_chunks in its kv_connector_extra_config"
    LAYERS = "layers", "is not done for models of which no layer's blocks all stay until the end"
    HOST_COPY = "host_copy", "is not done with a copy of the cache in host memory"
    ZEROED = (
        "zeroed",
        "is not done for models whose blocks vLLM zeroes before it uses them, where all of "
        "these stay until the end",
    )
    NO_ROOM = "no_room", "all rows for streams are taken, or the prompt does not fit one"
    REPEATED_KEY = "repeated_key", "another request has the key"
    PROMPT = "prompt", "prompts of this kind are not streamed"
    NOT_FOUND = "not_found", "the prefill engine does not stream it, or did not begin with the key"


MAX_ENDED = 4096
"""Keys of ended requests that are remembered, so that who comes too late is told so."""


class StreamDirectory:
    """Streams by key; safe for threads.

    Attributes: ``on_change``: called with a key of which something new is known, by who says it.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str], None] = lambda _: None
        self._lock = threading.Lock()
        self._found: dict[str, FoundStream] = {}
        self._ended: OrderedDict[str, FoundStream] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._found or key in self._ended

    def open(self, key: str, stream: FoundStream) -> None:
        with self._lock:
            if stream.refusal:
                self._remember(key, stream)
            else:
                self._found[key] = stream
        self.on_change(key)

    def tell(self, key: str, first_token: int, sampling: str) -> None:
        with self._lock:
            known = self._found[key]
            self._found[key] = msgspec.structs.replace(
                known, first_token=first_token, sampling=sampling
            )
        self.on_change(key)

    def end(self, key: str) -> None:
        with self._lock:
            if self._found.pop(key, None) is not None:
                self._remember(key, FoundStream(refusal="the prefill has ended"))
        self.on_change(key)

    def find(self, keys: Iterable[str], awaited: Iterable[str] = ()) -> dict[str, FoundStream]:
        with self._lock:
            known = {key: self._found.get(key) or self._ended.get(key) for key in keys}
            for key in awaited:
                stream = self._found.get(key) or self._ended.get(key)
                if stream is not None and (stream.first_token >= 0 or stream.refusal):
                    known[key] = stream
        return {key: stream for key, stream in known.items() if stream is not None}

    def _remember(self, key: str, stream: FoundStream) -> None:
        self._ended[key] = stream
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


class StreamProducer:
    """Prompts that are read while they are computed.

    A request's row is given back together with its fence, when no worker's blocks are read any
    more."""

    def __init__(
        self,
        fences: FenceSlots,
        directory: StreamDirectory,
        streaming: Streaming,
        identity: Identity,
        num_rows: int | None = None,
    ) -> None:
        self._fences = fences
        self._directory = directory
        self._streaming = streaming
        self._identity = identity
        self._has_rest = not keeps_every_token(streaming.groups)
        self._free_rows = list(range(num_rows or num_rows_of(streaming.pieces_per_row)))
        self._coming: set[str] = set()  # keys of prompts that have not begun

    def add(self, state: PrefillState, *, ends_well: bool = True) -> Handover:
        """A request has come in whose prompt another engine reads; returns how it will be handed
        over.  Unless it *ends well* nothing of it will be."""
        key = key_of(params_of(state.request))
        if not key:
            return Handover.NO_KEY
        if self._streaming.refusal:
            return self._streaming.refusal
        how = self._how(state.request, key) if ends_well else Handover.PROMPT
        if how == Handover.STREAMED:
            state.stream = Stream(key, self._free_rows.pop())
            self._coming.add(key)
        elif how != Handover.REPEATED_KEY:
            self._directory.open(key, FoundStream(refusal=how.meaning))
        return how

    def _how(self, request: Request, key: str) -> Handover:
        if key in self._directory or key in self._coming:
            return Handover.REPEATED_KEY
        if request.prompt_embeds is not None or request.resumable:
            return Handover.PROMPT
        fits = request.num_prompt_tokens <= self._streaming.max_tokens
        return Handover.STREAMED if self._free_rows and fits else Handover.NO_ROOM

    def take_step(
        self, states: Mapping[str, PrefillState], step: SchedulerOutput
    ) -> tuple[list[Chunk], list[Restart]]:
        preempted = (states.get(name) for name in step.preempted_req_ids or ())
        restarts = [self._restart(one) for one in preempted if one is not None and one.row >= 0]
        steps = ((states.get(one.request_id), one) for one in progress_in(step) if states)
        chunks = (self._advance(state, one) for state, one in steps if state is not None)
        return [chunk for chunk in chunks if chunk is not None], restarts

    def _restart(self, state: PrefillState) -> Restart:
        stream, nonce = state.stream, self._fences.nonce_in(state.slot)
        assert stream is not None
        self._fences.renew(state.slot)
        if state.phase is not PrefillPhase.UNWANTED:
            stream.num_blocks, stream.is_done = {}, False
            self._directory.open(stream.key, self._found(state, stream))
        return Restart(stream.row, state.slot, nonce)

    def _advance(self, state: PrefillState, progress: Progress) -> Chunk | None:
        stream = state.stream
        if stream is None or stream.is_done:
            return None
        begins = state.slot < 0
        if begins and not self._begin(state, stream):
            return None
        num_tokens = state.request.num_prompt_tokens
        end = min(progress.end, num_tokens)
        listed = tuple(self._listed(stream, progress, num_tokens))
        stream.is_done = end == num_tokens
        return Chunk(stream.row, self._fences.nonce_in(state.slot), listed, end, begins)

    def _listed(
        self, stream: Stream, progress: Progress, num_tokens: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
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

    def rest_of(self, state: PrefillState, offered: Sequence[Sequence[int]]) -> Listed:
        """List the number and the blocks of the other groups at the end of a prompt that has a
        row; ``offered`` has the blocks of all groups."""
        if not self._has_rest or state.row < 0:
            return ()
        streaming = self._streaming
        return tuple(
            (region.place, (len(ids), *ids))
            for group, region, ids in zip(streaming.groups, streaming.regions, offered, strict=True)
            if group.kind != FULL
        )

    def _begin(self, state: PrefillState, stream: Stream) -> bool:
        fence = self._fences.take()
        if fence is None:
            self._leave(state, stream, Handover.NO_ROOM.meaning)
            return False
        state.slot, stream.tag = fence
        self._coming.discard(stream.key)
        self._directory.open(stream.key, self._found(state, stream))
        return True

    def _leave(self, state: PrefillState, stream: Stream, refusal: str) -> None:
        state.stream = None
        self._free_rows.append(stream.row)
        self._coming.discard(stream.key)
        self._directory.open(stream.key, FoundStream(refusal=refusal))

    def _found(self, state: PrefillState, stream: Stream) -> FoundStream:
        request = state.request
        return FoundStream(
            request_id=request.request_id,
            num_tokens=request.num_prompt_tokens,
            row=stream.row,
            tag=stream.tag,
            fence_slot=state.slot,
            fence_nonce=self._fences.nonce_in(state.slot),
            prompt=digests(self._identity.prompt_of(request), request.num_prompt_tokens),
            regions=[region.first for region in self._streaming.regions],
        )

    def tell_token(self, state: PrefillState, first_token: int, sampling: str) -> None:
        if state.row >= 0 and state.stream is not None:
            self._directory.tell(state.stream.key, first_token, sampling)

    def note_finish(self, state: PrefillState) -> None:
        if state.stream is not None and state.row < 0:
            self._leave(state, state.stream, "the prefill has ended")

    def withdraw(self, state: PrefillState) -> None:
        """Publish nothing more of a prompt; who asks for it is told that it has ended."""
        if state.stream is not None:
            state.stream.is_done = True
        if state.row >= 0 and state.stream is not None:
            self._directory.end(state.stream.key)

    def give_back(self, state: PrefillState) -> None:
        if state.stream is not None:
            self._free_rows.append(state.stream.row)
            self._directory.end(state.stream.key)
