"""Asks other engines from the decode engine's scheduler process: prefill engines, whether they have
begun with requests whose keys are known here and which tokens follow these prompts, and engines
whose answers go on here, which blocks of them are on offer.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.client import NO_BACK_OFF, BackOff, ClientThread, SideChannel
from vllm_commext.nixl.wire.connection import SideChannelAddress
from vllm_commext.nixl.wire.params import TransferParams, transfer_params_of_stream

SHORT_WAIT_SECONDS = 0.02
"""Wait of a question if there are more keys than one takes, and between two questions if nothing
has changed here."""

Answer = TransferParams | CommextError


@dataclass
class _Wanted:
    """A request that waits for an answer about its key, and then perhaps for its first token."""

    key: str
    since: float
    awaits_token: bool
    is_found: bool = False


@dataclass
class _Waiters:
    """One side channel and the requests that wait for it; times in seconds of
    ``time.monotonic``."""

    channel: SideChannel
    wanted: dict[str, _Wanted] = field(default_factory=dict[str, _Wanted])
    asked: float = 0.0


class StreamAsker:
    """Requests that wait for prefill engines to begin.  A question is open at each side channel,
    which is answered as soon as something new is known there.

    Args:
        answer_seconds: how long one question waits for its answer, beyond the time for which the
            prefill engine may hold it.
    """

    def __init__(
        self,
        client: ClientThread,
        limit_seconds: float,
        answer_seconds: float,
        notify: Callable[[], None],
    ) -> None:
        self._client = client
        self._limit_seconds = limit_seconds
        self._answer_seconds = answer_seconds
        self._notify = notify
        self._waiters: dict[SideChannelAddress, _Waiters] = {}
        # Read by the other thread.
        self._answers: dict[str, Answer] = {}
        self._tokens: deque[tuple[str, tuple[int, str]]] = deque()
        self._awaited: set[str] = set()
        self._told = threading.Condition()

    def watch(
        self, request_id: str, key: str, address: SideChannelAddress, *, awaits_token: bool = False
    ) -> None:
        """Ask for a key at a side channel until there is an answer, and then, where it *awaits* it,
        for the first token after the prompt."""
        if awaits_token:
            self._awaited.add(request_id)
        wanted = _Wanted(key, time.monotonic(), awaits_token)
        self._client.call(self._watch, request_id, wanted, address)

    def settle(self, request_id: str) -> None:
        self._answers.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        self._client.call(self._forget, request_id)

    def answer(self, request_id: str) -> Answer | None:
        return self._answers.get(request_id)

    def wait_for_token(self, request_id: str, seconds: float) -> None:
        with self._told:
            self._told.wait_for(lambda: request_id not in self._awaited, seconds)

    def take_tokens(self) -> dict[str, tuple[int, str]]:
        taken: dict[str, tuple[int, str]] = {}
        while self._tokens:
            taken.update([self._tokens.popleft()])
        return taken

    def _watch(self, request_id: str, wanted: _Wanted, address: SideChannelAddress) -> None:
        waiters = self._waiters.get(address)
        if waiters is None:
            waiters = _Waiters(SideChannel(self._client, address, NO_BACK_OFF))
            self._waiters[address] = waiters
        waiters.wanted[request_id] = wanted
        self._ask(waiters)

    def _forget(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        for waiters in [*self._waiters.values()]:
            if request_id in waiters.wanted:
                self._end(waiters, request_id)
                self._leave_if_idle(waiters)

    def _ask(self, waiters: _Waiters) -> None:
        now = waiters.asked = time.monotonic()
        self._give_up(waiters, now)
        if self._leave_if_idle(waiters):
            return
        chosen = _some([(one.key, one.is_found) for one in waiters.wanted.values()])
        first = min((one.since for one in waiters.wanted.values() if not one.is_found), default=now)
        wait = min(wire.MAX_WAIT_SECONDS, first + self._limit_seconds - now)
        question = wire.FindStreams(
            keys=[key for key, is_found in chosen if not is_found],
            awaited=[key for key, is_found in chosen if is_found],
            wait_seconds=wait if len(chosen) == len(waiters.wanted) else SHORT_WAIT_SECONDS,
        )
        waiters.channel.ask(
            question,
            self._answer_seconds + wire.MAX_WAIT_SECONDS,
            partial(self._note_reply, waiters),
            partial(self._note_error, waiters),
            replaces=True,
        )

    def _note_reply(self, waiters: _Waiters, reply: wire.FoundStreams) -> None:
        is_changed = False
        for request_id, one in [*waiters.wanted.items()]:
            stream = reply.found.get(one.key)
            if stream is not None:
                is_changed |= self._note_stream(waiters, request_id, reply, stream)
        if reply.found:
            self._notify()
        if self._leave_if_idle(waiters):
            return
        rest = 0.0 if is_changed else waiters.asked + SHORT_WAIT_SECONDS - time.monotonic()
        self._client.after(rest, partial(self._ask, waiters))

    def _note_stream(
        self, waiters: _Waiters, request_id: str, reply: wire.FoundStreams, stream: wire.FoundStream
    ) -> bool:
        one, begins_to_await = waiters.wanted[request_id], False
        if not one.is_found:
            one.is_found = True
            answer = self._answers[request_id] = _transfer_params(reply, stream)
            one.awaits_token &= isinstance(answer, TransferParams)
            begins_to_await = one.awaits_token
        has_token = one.awaits_token and stream.first_token >= 0
        if has_token:
            self._tokens.append((request_id, (stream.first_token, stream.sampling)))
        if has_token or stream.refusal or not one.awaits_token:
            self._end(waiters, request_id)
        return begins_to_await

    def _note_error(self, waiters: _Waiters, error: CommextError) -> None:
        self._fail([*waiters.wanted], waiters, error)
        self._leave_if_idle(waiters)

    def _give_up(self, waiters: _Waiters, now: float) -> None:
        begun = now - self._limit_seconds
        late = [
            name for name, one in waiters.wanted.items() if not one.is_found and one.since <= begun
        ]
        error = CommextTimeoutError(
            f"no prefill engine has begun with the request's stream_key within "
            f"{self._limit_seconds:g} s (stream_begin_timeout): does its router send the same key "
            "to both engines, at the same time?"
        )
        self._fail(late, waiters, error)

    def _fail(self, request_ids: list[str], waiters: _Waiters, error: CommextError) -> None:
        for request_id in request_ids:
            if not waiters.wanted[request_id].is_found:
                self._answers[request_id] = error
            self._end(waiters, request_id)
        if request_ids:
            self._notify()

    def _end(self, waiters: _Waiters, request_id: str) -> None:
        del waiters.wanted[request_id]
        with self._told:
            self._awaited.discard(request_id)
            self._told.notify_all()

    def _leave_if_idle(self, waiters: _Waiters) -> bool:
        if waiters.wanted:
            return False
        waiters.channel.close()
        if self._waiters.get(waiters.channel.address) is waiters:
            del self._waiters[waiters.channel.address]
        return True


def _some(keys: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    first = time.monotonic_ns() % len(keys) if len(keys) > wire.MAX_KEYS else 0
    return [*keys[first:], *keys[:first]][: wire.MAX_KEYS]


def _transfer_params(reply: wire.FoundStreams, stream: wire.FoundStream) -> Answer:
    if stream.refusal:
        return ProtocolError(f"prefill engine {reply.engine_id!r}: {stream.refusal}")
    remote = RemoteRequest(
        engine_id=reply.engine_id,
        incarnation=reply.incarnation,
        host=reply.host,
        port=reply.port,
        tp_size=reply.tp_size,
        pp_size=reply.pp_size,
        request_id=stream.request_id,
        block_ids=(),
        num_tokens=stream.num_tokens,
        fence_slot=stream.fence_slot,
        fence_nonce=stream.fence_nonce,
        stream_row=stream.row,
        stream_tag=stream.tag,
        stream_regions=tuple(stream.regions),
    )
    try:
        return transfer_params_of_stream(remote, stream.prompt)
    except ProtocolError as error:
        return error


BACK_OFF = BackOff()
MAX_CHANNELS = 128
"""Side channels that are known at a time; the one that was asked least recently makes room."""


@dataclass(eq=False)
class _Search:
    """One request's questions."""

    request_id: str
    question: wire.FindBlocks
    until: float
    num_open: int
    best: wire.FoundBlocks | None = None


class BlockFinder:
    """Requests whose blocks are being looked for."""

    def __init__(
        self, client: ClientThread, limit_seconds: float, notify: Callable[[], None]
    ) -> None:
        self._client = client
        self._limit_seconds = limit_seconds
        self._notify = notify
        self._searches: dict[str, _Search] = {}
        # The one that was asked last comes last.
        self._channels: dict[SideChannelAddress, SideChannel] = {}
        self._log = RateLimitedLog()

    def search(
        self, request_id: str, hashes: Sequence[bytes], addresses: Sequence[SideChannelAddress]
    ) -> None:
        asked = b"".join(hashes[: wire.MAX_HASHES])
        question = wire.FindBlocks(hashes=asked)
        until = time.monotonic() + self._limit_seconds
        search = self._searches[request_id] = _Search(request_id, question, until, len(addresses))
        self._client.call(self._ask, search, addresses)

    def is_done(self, request_id: str) -> bool:
        search = self._searches.get(request_id)
        return search is None or search.num_open <= 0 or time.monotonic() >= search.until

    def take(self, request_id: str) -> wire.FoundBlocks | None:
        search = self._searches.pop(request_id, None)
        return search.best if search is not None else None

    def _ask(self, search: _Search, addresses: Sequence[SideChannelAddress]) -> None:
        for address in addresses:
            channel = self._channels.pop(address, None)
            channel = channel or SideChannel(self._client, address, BACK_OFF)
            self._channels[address] = channel
            try:
                channel.ask(
                    search.question,
                    self._limit_seconds,
                    partial(self._note_reply, search),
                    partial(self._note_error, search, channel),
                )
            except CommextError:
                self._note_end(search)
        num_over = max(0, len(self._channels) - MAX_CHANNELS)
        idle = [key for key, channel in self._channels.items() if not channel.is_asking]
        for key in idle[:num_over]:
            self._channels.pop(key).close()

    def _note_reply(self, search: _Search, found: wire.FoundBlocks) -> None:
        num_found, num_asked = len(found.block_ids), len(search.question.hashes) // wire.HASH_BYTES
        if not num_found == len(found.generations) <= num_asked:
            raise ProtocolError(
                f"expected at most {num_asked} blocks with a generation each, got {num_found} with "
                f"{len(found.generations)}"
            )
        longest = len(search.best.block_ids) if search.best is not None else 0
        if num_found > longest:
            search.best = found
        self._note_end(search)

    def _note_error(self, search: _Search, channel: SideChannel, error: CommextError) -> None:
        self._log.warning(
            "reuse",
            f"block lookup at {channel.address} failed, retrying in "
            f"{channel.retry_at - time.monotonic():.2g} s: {error}",
        )
        self._note_end(search)

    def _note_end(self, search: _Search) -> None:
        is_last = search.num_open == 1 and search.request_id in self._searches
        search.num_open -= 1
        if is_last:
            self._notify()
