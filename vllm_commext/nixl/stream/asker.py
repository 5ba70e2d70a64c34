"""Asks prefill engines, from the decode engine's scheduler process, whether they have begun with
requests whose keys are known here.

One thread asks each side channel for all of its keys at once, again and again while any is not
answered, and rings when there is something to take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.inquiry import Inquiry
from vllm_commext.nixl.wire.params import Handle, handle_of_stream

MIN_INTERVAL_SECONDS = 0.02
MAX_INTERVAL_SECONDS = 0.2
PART_OF_WAIT = 0.1
"""Between two questions, of how long has been waited: what comes late matters less."""
_LOOK_SECONDS = 0.005
_CLOSE_SECONDS = 1.0

Place = tuple[str, int]
Answer = Handle | CommextError


@dataclass
class _Place:
    """One side channel; times in seconds of ``time.monotonic``."""

    waiting: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    inquiry: Inquiry | None = None
    asked: float = 0.0
    is_asking: bool = False


class StreamAsker:
    """Requests that wait for prefill engines to begin.

    Args:
        consumer: this engine's id.
        secret: the side channels' secret, None where there is none.
        limit_seconds: how long one request waits.
        answer_seconds: how long one question waits for its answer.
        ring: called when an answer can be taken.
    """

    def __init__(
        self,
        consumer: str,
        secret: bytes | None,
        limit_seconds: float,
        answer_seconds: float,
        ring: Callable[[], None],
    ) -> None:
        self._consumer = consumer
        self._secret = secret
        self._limit_seconds = limit_seconds
        self._answer_seconds = answer_seconds
        self._ring = ring
        self._places: dict[Place, _Place] = {}
        self._answers: dict[str, Answer] = {}
        self._wakes = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def watch(self, request_id: str, key: str, place: Place) -> None:
        """Ask for a key at a side channel until there is an answer."""
        with self._wakes:
            known = self._places.setdefault(place, _Place())
            known.waiting[request_id] = key, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="commext-streams", daemon=True
                )
                self._thread.start()
            self._wakes.notify()

    def forget(self, request_id: str) -> None:
        """The request has ended, or has its answer."""
        with self._wakes:
            self._answers.pop(request_id, None)
            for place in self._places.values():
                place.waiting.pop(request_id, None)

    def answer(self, request_id: str) -> Answer | None:
        """Where the request's prompt is read, or why it cannot be; None while nothing is known."""
        with self._wakes:
            return self._answers.get(request_id)

    def close(self) -> None:
        """End the thread, bounded; may be called again."""
        with self._wakes:
            self._is_closed = True
            self._wakes.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._is_closed or bool(self._places))
                if self._is_closed:
                    break
                places = list(self._places.items())
            for where, place in places:
                try:
                    self._look(context, where, place)
                except Exception as error:  # noqa: BLE001 one prefill engine's error is no other's
                    self._fail(place, _as_error(error, where))
            with self._wakes:
                self._wakes.wait_for(lambda: self._is_closed, _LOOK_SECONDS)
        for place in self._places.values():
            _hang_up(place)
        context.destroy(linger=0)

    def _look(self, context: zmq.Context[zmq.Socket[bytes]], where: Place, place: _Place) -> None:
        now = time.monotonic()
        self._give_up(place, now)
        with self._wakes:
            keys = [key for key, _ in place.waiting.values()]
            waited = now - min((since for _, since in place.waiting.values()), default=now)
            if not keys:
                del self._places[where]
        if not keys:
            _hang_up(place)
            return
        if place.is_asking:
            self._take(place, now)
            return
        interval = min(max(PART_OF_WAIT * waited, MIN_INTERVAL_SECONDS), MAX_INTERVAL_SECONDS)
        if now - place.asked < interval:
            return
        question = wire.FindStreams(keys=_some(keys, place.asked), consumer=self._consumer)
        place.asked, place.is_asking = now, True
        if place.inquiry is None:
            place.inquiry = Inquiry(context, *where, question, self._secret)
        else:
            place.inquiry.ask(question)

    def _take(self, place: _Place, now: float) -> None:
        assert place.inquiry is not None  # there is a question
        reply = place.inquiry.poll()
        if reply is None:
            if now - place.asked >= self._answer_seconds:
                raise CommextTimeoutError(f"no answer within {self._answer_seconds:g} s")
            return
        if not isinstance(reply, wire.FoundStreams):
            raise ProtocolError("expected an answer about streams, got a worker's description")
        place.is_asking = False
        with self._wakes:
            waiting = dict(place.waiting)
        found = {
            request_id: _handle(reply, reply.found[key])
            for request_id, (key, _) in waiting.items()
            if key in reply.found
        }
        self._tell(place, found)

    def _give_up(self, place: _Place, now: float) -> None:
        with self._wakes:
            late = [
                request_id
                for request_id, (_, since) in place.waiting.items()
                if now - since >= self._limit_seconds
            ]
        error = CommextTimeoutError(
            f"no prefill engine has begun with the request's stream_key within "
            f"{self._limit_seconds:g} s (stream_begin_timeout): does its router send the same key "
            "to both engines, at the same time?"
        )
        self._tell(place, dict.fromkeys(late, error))

    def _fail(self, place: _Place, error: CommextError) -> None:
        """Nothing can be asked there: all that waits for it fails."""
        _hang_up(place)
        with self._wakes:
            failed = list(place.waiting)
        self._tell(place, dict.fromkeys(failed, error))

    def _tell(self, place: _Place, answers: dict[str, Answer]) -> None:
        with self._wakes:
            still = {name: one for name, one in answers.items() if name in place.waiting}
            self._answers.update(still)
            for request_id in still:
                del place.waiting[request_id]
        if still:
            self._ring()


def _hang_up(place: _Place) -> None:
    inquiry, place.inquiry, place.is_asking = place.inquiry, None, False
    if inquiry is not None:
        inquiry.close()


def _some(keys: list[str], turn: float) -> list[str]:
    """As many keys as one question takes; others each time."""
    first = int(turn * 1000) % len(keys) if len(keys) > wire.MAX_KEYS else 0
    return [*keys[first:], *keys[:first]][: wire.MAX_KEYS]


def _handle(reply: wire.FoundStreams, stream: wire.FoundStream) -> Answer:
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
        return handle_of_stream(remote, stream.prompt)
    except ProtocolError as error:
        return error


def _as_error(error: Exception, where: Place) -> CommextError:
    if isinstance(error, CommextError):
        return error
    return ProtocolError(f"the side channel {where} cannot be asked for streams: {error!r}")
