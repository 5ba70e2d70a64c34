"""Asks prefill engines, from the decode engine's scheduler process, whether they have begun with
requests whose keys are known here, and which tokens follow these prompts.

One thread has a question open at each side channel, which is answered as soon as something new is
known there; it notifies when there is an answer for a request.
"""

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wakeup import Wakeup
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import SideChannelAddress
from vllm_commext.nixl.wire.inquiry import Inquiry
from vllm_commext.nixl.wire.params import TransferParams, transfer_params_of_stream
from vllm_commext.nixl.wire.seal import OtherAnswerError

SHORT_WAIT_SECONDS = 0.02
"""Of a question where there are more keys than one takes, and from one question to the next where
nothing has changed here."""
_LOOK_SECONDS = 0.05
"""Between two looks whether a connection has closed or a request has waited for too long."""
_CLOSE_SECONDS = 1.0

Answer = TransferParams | CommextError


@dataclass
class _Waiting:
    """A request with no answer yet, or whose first token is awaited."""

    key: str
    since: float
    awaits_token: bool


@dataclass
class _Channel:
    """One side channel; times in seconds of ``time.monotonic``."""

    waiting: dict[str, _Waiting] = field(default_factory=dict[str, _Waiting])
    awaited: dict[str, _Waiting] = field(default_factory=dict[str, _Waiting])
    inquiry: Inquiry | None = None
    asked: float = 0.0
    is_asking: bool = False
    is_changed: bool = False


class StreamAsker:
    """Requests that wait for prefill engines to begin.

    Args:
        consumer: this engine's id.
        secret: the side channels' secret, None where there is none.
        limit_seconds: how long one request waits.
        answer_seconds: how long one question waits for its answer, beyond the time for which the
            prefill engine may keep it.
        notify: called when an answer or a token can be taken.
    """

    def __init__(
        self,
        consumer: str,
        secret: bytes | None,
        limit_seconds: float,
        answer_seconds: float,
        notify: Callable[[], None],
    ) -> None:
        self._consumer = consumer
        self._secret = secret
        self._limit_seconds = limit_seconds
        self._answer_seconds = answer_seconds
        self._notify = notify
        self._channels: dict[SideChannelAddress, _Channel] = {}
        self._answers: dict[str, Answer] = {}
        self._tokens: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._wakeup = Wakeup()

    def watch(
        self, request_id: str, key: str, address: SideChannelAddress, *, awaits_token: bool = False
    ) -> None:
        """Ask for a key at a side channel until there is an answer, and then, where it *awaits* it,
        for the first token after the prompt."""
        with self._lock:
            known = self._channels.setdefault(address, _Channel())
            known.waiting[request_id] = _Waiting(key, time.monotonic(), awaits_token)
            known.is_changed = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="commext-streams", daemon=True
                )
                self._thread.start()
            self._wakeup.notify()

    def settle(self, request_id: str) -> None:
        """The request has its answer."""
        with self._lock:
            self._answers.pop(request_id, None)
            for channel in self._channels.values():
                channel.waiting.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request has ended, or its first token is not awaited any more."""
        self.settle(request_id)
        with self._lock:
            self._tokens.pop(request_id, None)
            for channel in self._channels.values():
                channel.awaited.pop(request_id, None)

    def answer(self, request_id: str) -> Answer | None:
        """Where the request's prompt is read, or why it cannot be; None while nothing is known."""
        with self._lock:
            return self._answers.get(request_id)

    def wait_for_token(self, request_id: str, seconds: float) -> None:
        """Wait until the first token after the request's prompt has come, or none comes, for at
        most so long."""
        with self._told:
            self._told.wait_for(lambda: not self._is_awaited(request_id), seconds)

    def take_tokens(self) -> dict[str, tuple[int, str]]:
        """First tokens that have come since the last call, and what each was drawn by; asked before
        each step."""
        if not self._tokens:
            return {}
        with self._lock:
            taken, self._tokens = self._tokens, {}
            return taken

    def _is_awaited(self, request_id: str) -> bool:
        return any(request_id in channel.awaited for channel in self._channels.values())

    def close(self) -> None:
        """End the thread, bounded; may be called again."""
        with self._lock:
            self._is_closed = True
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        else:
            self._wakeup.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    break
                channels = list(self._channels.items())
            for address, channel in channels:
                try:
                    self._look(address, channel)
                except Exception as error:  # noqa: BLE001 one prefill engine's error is no other's
                    self._fail(channel, _as_error(error, address))
            self._sleep([channel.inquiry for _, channel in channels if channel.inquiry is not None])
        for channel in self._channels.values():
            _hang_up(channel)
        self._wakeup.close()

    def _sleep(self, inquiries: list[Inquiry]) -> None:
        """Until something arrives or is to be asked, or it is time to look."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        for one in inquiries:
            if one.socket.fileno() >= 0:
                poller.register(one.socket, one.socket.events)
        with self._lock:
            is_idle = not self._channels
        poller.poll(None if is_idle else int(1000 * _LOOK_SECONDS))
        self._wakeup.clear()

    def _look(self, address: SideChannelAddress, channel: _Channel) -> None:
        now = time.monotonic()
        self._give_up(channel, now)
        if channel.inquiry is not None:
            self._take(channel.inquiry, channel)
        with self._lock:
            keys = [one.key for one in channel.waiting.values()]
            awaited = [one.key for one in channel.awaited.values()]
            if not (keys or awaited):
                del self._channels[address]
            is_changed, channel.is_changed = channel.is_changed, False
        if not (keys or awaited):
            _hang_up(channel)
        elif is_changed or (not channel.is_asking and now - channel.asked >= SHORT_WAIT_SECONDS):
            self._ask(address, channel, keys, awaited)
        elif (
            channel.is_asking
            and now - channel.asked >= self._answer_seconds + wire.MAX_WAIT_SECONDS
        ):
            raise CommextTimeoutError(f"no answer within {now - channel.asked:g} s")

    def _ask(
        self, address: SideChannelAddress, channel: _Channel, keys: list[str], awaited: list[str]
    ) -> None:
        channel.asked, channel.is_asking = time.monotonic(), True
        has_all = len(keys) + len(awaited) <= wire.MAX_KEYS
        chosen = _some([*((key, False) for key in keys), *((key, True) for key in awaited)])
        question = wire.FindStreams(
            keys=[key for key, is_awaited in chosen if not is_awaited],
            awaited=[key for key, is_awaited in chosen if is_awaited],
            wait_seconds=wire.MAX_WAIT_SECONDS if has_all else SHORT_WAIT_SECONDS,
            consumer=self._consumer,
        )
        if channel.inquiry is None:
            channel.inquiry = Inquiry(*address, question, self._secret)
        else:
            channel.inquiry.ask(question)

    def _take(self, inquiry: Inquiry, channel: _Channel) -> None:
        """Take the answers that have arrived; one to a question before the last one says nothing
        that the last one's will not say."""
        while True:
            try:
                reply = inquiry.poll()
            except OtherAnswerError:
                continue
            if reply is None:
                return
            if not isinstance(reply, wire.FoundStreams):
                raise ProtocolError("expected an answer about streams, got another one")
            channel.is_asking = False
            self._note_found(channel, reply)

    def _note_found(self, channel: _Channel, reply: wire.FoundStreams) -> None:
        with self._lock:
            waiting, awaited = dict(channel.waiting), dict(channel.awaited)
        found: dict[str, Answer] = {
            request_id: _transfer_params(reply, reply.found[one.key])
            for request_id, one in waiting.items()
            if one.key in reply.found
        }
        self._tell(channel, found)
        told = {**awaited, **{name: waiting[name] for name in found}}
        with self._lock:
            for request_id, one in told.items():
                stream = reply.found.get(one.key)
                if stream is not None and request_id in channel.awaited:
                    if stream.first_token >= 0:
                        self._tokens[request_id] = stream.first_token, stream.sampling
                    if stream.first_token >= 0 or stream.refusal:
                        del channel.awaited[request_id]
            self._told.notify_all()
            has_tokens = bool(self._tokens)
        if has_tokens:
            self._notify()

    def _give_up(self, channel: _Channel, now: float) -> None:
        with self._lock:
            late = [
                request_id
                for request_id, one in channel.waiting.items()
                if now - one.since >= self._limit_seconds
            ]
        error = CommextTimeoutError(
            f"no prefill engine has begun with the request's stream_key within "
            f"{self._limit_seconds:g} s (stream_begin_timeout): does its router send the same key "
            "to both engines, at the same time?"
        )
        self._tell(channel, dict.fromkeys(late, error))

    def _fail(self, channel: _Channel, error: CommextError) -> None:
        """Nothing can be asked there: all that waits for it fails, and no token comes."""
        _hang_up(channel)
        with self._lock:
            failed = list(channel.waiting)
            channel.awaited.clear()
            self._told.notify_all()
        self._tell(channel, dict.fromkeys(failed, error))

    def _tell(self, channel: _Channel, answers: dict[str, Answer]) -> None:
        with self._lock:
            still = {name: one for name, one in answers.items() if name in channel.waiting}
            self._answers.update(still)
            for request_id, answer in still.items():
                one = channel.waiting.pop(request_id)
                if one.awaits_token and isinstance(answer, TransferParams):
                    channel.awaited[request_id], channel.is_changed = one, True
        if still:
            self._notify()


def _hang_up(channel: _Channel) -> None:
    inquiry, channel.inquiry, channel.is_asking = channel.inquiry, None, False
    if inquiry is not None:
        inquiry.close()


def _some(keys: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """As many keys as one question takes; others each time."""
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


def _as_error(error: Exception, address: SideChannelAddress) -> CommextError:
    if isinstance(error, CommextError):
        return error
    return ProtocolError(f"the side channel {address} cannot be asked for streams: {error!r}")
