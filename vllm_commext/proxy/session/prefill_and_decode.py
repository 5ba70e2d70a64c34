"""One attempt at a request: engines are chosen, one computes the prompt, one answers."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_commext.proxy import errors_phases
from vllm_commext.proxy.engines.engine import DECODE, UNKNOWN, Engine, SideChannel
from vllm_commext.proxy.errors_phases import AtOnce, LocalPrefill, ProxyError, Route
from vllm_commext.proxy.session import two_step_bodies
from vllm_commext.proxy.session.ask_engines import KEY_BYTES, Payload, Prefilled, Service
from vllm_commext.proxy.session.failures import Opened, Tries, has_begun, is_dead
from vllm_commext.proxy.session.two_step_bodies import Asked, decode_body, own_params

logger = logging.getLogger("vllm.commext.proxy")

_PLACE_FIELDS = ("remote_host", "remote_port", "remote_place_seal")
CHECK_SECONDS = 10.0
"""Longest wait for a check of an engine that has broken a connection."""
LOOK_SECONDS = 0.02


def read_from(engine: Engine, engines: Iterable[Engine], body: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of *body* for an engine that reads the answer so far at *engine*; none unless every
    usable one of *engines* can."""
    known, others = engine.capabilities, [one.capabilities for one in engines if one.usable]
    if not (known.caches and known.offers and all(one.caches and one.offers for one in others)):
        return {}
    return {"kv_transfer_params": {**own_params(body), "reuse_from": list(known.offers)}}


def place_or_reason(engine: Engine) -> SideChannel | AtOnce:
    known = engine.capabilities
    if not known.streams:
        return AtOnce.NOT_KNOWN
    first, *others = known.ranks
    if others:
        return AtOnce.SEVERAL
    return AtOnce.BUSY if engine.work.is_busy else first.channel


@dataclass(eq=False)
class Stream:
    """One attempt at both steps at once. way: how it went. *ask* asks a decode engine."""

    _body: Mapping[str, Any]
    _payload: Callable[[Mapping[str, Any], asyncio.Task[Opened] | None], Payload]
    _ask: Callable[[Mapping[str, Any], Engine], Coroutine[Any, Any, Opened]]
    way: AtOnce | None = None
    _asked: Engine | None = None
    _place: SideChannel | None = None
    _decode: asyncio.Task[Opened] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._decode is not None

    async def prefill_payload(self, engine: Engine, key: str = "") -> Payload:
        """Payload for a prefill engine; asks the decode engine at the same time."""
        await self.cancel()
        if self._place is not None:
            self.way = AtOnce.AGAIN
        place = self.way or place_or_reason(engine)
        if isinstance(place, AtOnce):
            self.way = place
            return self._payload(two_step_bodies.prefill_body(self._body, key), None)
        self._place, self._asked = place, engine
        engine.work.waiting.add(self)
        stream_key = secrets.token_hex(KEY_BYTES)
        where = zip(_PLACE_FIELDS, (place.host, place.port, place.seal), strict=True)
        params = {"do_remote_prefill": True, "do_remote_decode": False, "stream_key": stream_key}
        body = decode_body(self._body, {**params, **dict(where)})
        self._decode = reader = asyncio.create_task(self._ask(body, engine))
        return self._payload(two_step_bodies.prefill_body(self._body, key, stream_key), reader)

    @property
    def source(self) -> str:
        return self._asked.name if self._asked is not None else ""

    @property
    def is_alone(self) -> bool:
        return self.is_under_way and self.way is AtOnce.ALONE

    async def outlives(self, error: ProxyError) -> bool:
        """True if the decode engine goes on after *error*: it answers, or the other is gone."""
        engine, decode, is_lost = self._asked, self._decode, error.kind == "lost" or is_dead(error)
        if engine is None or decode is None or error.status < 500:
            return False
        state = engine.state
        if is_lost:
            state.suspect()
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS):
                while is_lost and state.suspected and state.healthy and not has_begun(decode):
                    await asyncio.sleep(LOOK_SECONDS)
        if has_begun(decode) or (is_lost and not state.healthy):
            self.way = AtOnce.ALONE
        return self.is_alone

    async def check_place(self, params: Mapping[str, Any]) -> None:
        """Let go of the decode engine if the prefill engine's answer names another side channel."""
        engine, place = self._asked, self._place
        if engine is None or place is None:
            return
        told = [params.get(name) for name in _PLACE_FIELDS]
        if None not in told and told != [place.host, place.port, place.seal]:
            engine.learn(UNKNOWN)
            await self.cancel()
            self.way = AtOnce.SEVERAL

    async def opened(self) -> Opened | ProxyError:
        """The decode engine's answer, the caller's to close, or its failure."""
        assert self._decode is not None  # asked for where it is under way
        try:
            opened = await asyncio.shield(self._decode)
        except ProxyError as error:
            self.way = AtOnce.FAILED
            assert self._asked is not None  # as long as the decode engine is asked
            self._asked.learn_again()
            self._leave()
            return error
        self.way = self.way or AtOnce.STREAMED
        self._leave()
        return opened

    async def cancel(self) -> None:
        """Let go of the decode engine, which aborts the rest."""
        decode = self._decode
        if decode is None:
            return
        self._leave()
        decode.add_done_callback(_close)  # also where this task is cancelled meanwhile
        decode.cancel()
        await asyncio.gather(decode, return_exceptions=True)

    def _leave(self) -> None:
        assert self._asked is not None  # as long as the decode engine is asked
        self._asked.work.waiting.discard(self)
        self._asked = self._decode = None


def _close(decode: asyncio.Task[Opened]) -> None:
    if decode.cancelled():
        return
    error = decode.exception()
    if error is None:
        decode.result().close()
    elif not isinstance(error, ProxyError):
        logger.error("failed to close a connection to a decode engine", exc_info=error)


class Attempt:
    """route: how the answer comes about."""

    def __init__(self, service: Service, asked: Asked, tries: Tries, route: Route) -> None:
        self._service, self._asked, self._tries, self.route = service, asked, tries, route
        self.plan, self._prefilled_at = None, 0.0
        self._prefilled: Prefilled | None = None
        self._source: Engine | None = None
        """Prefill engine whose KV cache a decode engine is asked to read."""

    def choose(self) -> None:
        asked, tries = self._asked, self._tries
        is_split = asked.endpoint.is_split
        self.route.path = self.route.path if is_split else errors_phases.DIRECT
        if not asked.endpoint.computes or tries.only is not None:
            return
        self.plan = self._service.chooser.plan(
            *(asked.prefix, asked.tokens, tries.prefill + tries.decode),
            may_hand_over=is_split and asked.local_reason is None,
        )
        if self.plan is not None:
            self.route.placement, self.route.ways = self.plan.as_header(), self.plan.ways
            self._service.metrics.ways.placements.labels(self.plan.kind).inc()

    @property
    def local_reason(self) -> LocalPrefill | None:
        """Reason why no prefill engine is asked, or None."""
        is_local = self.plan is not None and self.plan.prefill is None
        return self._asked.local_reason or (LocalPrefill.PLACEMENT if is_local else None)

    async def prefill(self) -> Opened | None:
        """Have the prompt computed; the answer, if both steps were taken at once."""
        stream, prefilled = self._stream(), None
        metrics = self._service.metrics.ways
        try:
            prefilled = self._prefilled = await self._prefill(stream)
            if prefilled is not None:
                await stream.check_place(prefilled.kv_transfer_params or {})
            if stream.is_under_way and (prefilled is not None or stream.is_alone):
                opened = await self._take_stream(stream, prefilled)
                if opened is not None:
                    return opened
        finally:
            await stream.cancel()
            if prefilled is not None or stream.way is AtOnce.ALONE:
                metrics.streams.labels(stream.way or AtOnce.STREAMED).inc()
        if prefilled is not None and not self._has_reader(prefilled.engine):
            self.release()
            metrics.local_prefills.labels(LocalPrefill.NO_READER).inc()
        self.route.path = errors_phases.LOCAL_PREFILL
        return None

    async def decode(self, changes: Mapping[str, Any]) -> Opened:
        """A decode engine's answer. *changes*: of the body."""
        prefilled, body, tries = self._prefilled, {**self._asked.body, **changes}, self._tries
        if prefilled is not None and prefilled.kv_transfer_params is not None:
            self.route.path, self.route.prefill = errors_phases.TWO_STEP, prefilled.engine.name
            body = two_step_bodies.decode_body(body, prefilled.kv_transfer_params)
            self._source = prefilled.engine
        opened = await self._decode(body, self._avoided())
        if tries.num_resumed:
            opened.cached_tokens = tries.cached_tokens
        else:
            tries.cached_tokens = None if prefilled is None else prefilled.cached_tokens
        return opened

    def note_opened(self, opened: Opened) -> None:
        service = self._service
        if self._asked.endpoint.keeps and (name := opened.answer_id):
            service.chooser.keepers.note(name, opened.engine)
        seconds = self.hand_over(opened)
        if seconds is not None and opened.cutter is not None:
            opened.engine.load.shared.handover.add(seconds)

    def hand_over(self, opened: Opened) -> float | None:
        """Give the prefill's KV cache to the engine that answers; the seconds that passed since it
        was computed, or None if none was."""
        prefilled, self._prefilled = self._prefilled, None
        if prefilled is None:
            return None
        if prefilled.job is not None:
            if opened.answer is not None:
                opened.answer.source = prefilled.job
            else:
                prefilled.job.read()
        return max(0.0, opened.opened_at - self._prefilled_at)

    def release(self) -> None:
        """Have the prefill engine free what will not be read."""
        prefilled, self._prefilled = self._prefilled, None
        if prefilled is None:
            return
        if prefilled.job is not None:
            prefilled.job.read()
        self._service.upstream.releases.add(prefilled.key)
        if not prefilled.key.value:
            logger.warning(
                "request %s ended before a decode engine answered: unless one has read them, "
                "%s keeps its KV blocks until their lease expires",
                *(self._asked.headers["X-Request-Id"], prefilled.engine.name),
            )

    def blame(self, error: ProxyError) -> None:
        """Leave the next attempt to others: a load fails because of either side."""
        self._tries.blame(error, self._service.upstream.decode_pool.engines)
        if self._source is not None:
            self._tries.prefill.append(self._source)

    def _has_reader(self, source: Engine) -> bool:
        urls = {one.url for one in self._service.upstream.decode_pool.engines if one.usable}
        return urls != {source.url}

    def _avoided(self) -> list[Engine]:
        """Decode engines to ask last: those that failed, and the prefill engine itself, which
        cannot read from itself while it changes its role."""
        source, tries = self._source.url if self._source else None, self._tries
        itself = [one for one in self._service.upstream.decode_pool.engines if one.url == source]
        left = [tries.answered_by] if tries.answered_by is not None else []
        return tries.decode + itself + left

    def _payload(
        self, body: Mapping[str, Any], reader: asyncio.Task[Opened] | None = None
    ) -> Payload:
        asked = self._asked
        return Payload(
            *(asked.path, asked.headers, body, asked.tokens, asked.prefix, self._tries),
            *(self.plan, self.route.marks, None, reader),
        )

    async def _decode(self, body: Mapping[str, Any], avoided: Sequence[Engine]) -> Opened:
        payload = self._payload(body)
        if (transcript := self._asked.transcript) is not None:
            every = self._service.upstream.decode_pool.engines
            asks_mark = all(one.capabilities.ranks for one in every if one.usable)
            payload.body, payload.edit = transcript.asking(body, asks_mark), transcript.edit
        return await self._service.upstream.decode(payload, avoided, self.route)

    def _stream(self) -> Stream:
        async def ask(body: Mapping[str, Any], source: Engine) -> Opened:
            if not self._has_reader(source):
                message = f"no decode engine can be asked beside {source.name}"
                raise ProxyError(503, "no_engine", message, side=DECODE, can_restart=True)
            return await self._decode(body, [*self._tries.decode, source])

        usable = [one for one in self._service.upstream.decode_pool.engines if one.usable]
        body, way = self._asked.body, AtOnce.AGAIN
        if not self._service.config.may_stream:
            way = AtOnce.OFF
        elif not self._tries.is_again:
            reads = all(one.capabilities.streams for one in usable)
            way = two_step_bodies.reason_against_both(body) or (None if reads else AtOnce.DECODE)
        return Stream(body, self._payload, ask, way)

    async def _take_stream(self, stream: Stream, prefilled: Prefilled | None) -> Opened | None:
        """Answer of a decode engine asked at once; None: ask it again with the prefill's answer."""
        self.route.path, self.route.prefill = errors_phases.STREAMED, stream.source
        opened = await stream.opened()
        if isinstance(opened, ProxyError):
            if prefilled is None or not opened.can_restart:
                raise opened
            logger.warning(
                "request %s is not streamed: %s", self._asked.headers["X-Request-Id"], opened
            )
            return None
        if prefilled is not None:
            opened.cached_tokens = self._tries.cached_tokens = prefilled.cached_tokens
        return opened

    async def _prefill(self, stream: Stream) -> Prefilled | None:
        """The first step, or None, counted by reason."""
        if (reason := self.local_reason) is None:
            payload, failed = self._payload(self._asked.body), self._tries.prefill
            try:
                prefilled = await self._service.upstream.prefill(
                    *(payload, failed, stream.prefill_payload, stream.outlives)
                )
            except ProxyError as error:
                is_final = error.kind in (errors_phases.ENGINES_LOST, "overloaded")
                if is_final or error.status < 500 or (error.answer and not error.can_restart):
                    raise
                away = error.kind in ("no_engine", "unreachable", "lost", "draining", "aborted")
                away = away or is_dead(error)
                reason = LocalPrefill.PREFILL_AWAY if away else LocalPrefill.PREFILL_FAILED
                reason = LocalPrefill.AFTER_FAILURE if failed else reason
            else:
                self._prefilled_at = time.monotonic()
                if prefilled.kv_transfer_params is not None:
                    if prefilled.job is not None:
                        prefilled.job.keep()
                    return prefilled
                reason = LocalPrefill.NO_PARAMETERS
                logger.info(
                    "%s returned no kv_transfer_params; has it a KV connector as producer?",
                    prefilled.engine.name,
                )
        self._service.metrics.ways.local_prefills.labels(reason).inc()
        return None
