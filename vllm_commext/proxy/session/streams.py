"""Asks a prefill and a decode engine at once: D reads while P computes."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_commext.proxy.config import NEVER
from vllm_commext.proxy.deadline import end_tasks
from vllm_commext.proxy.engines.pool import UNKNOWN, Engine, SideChannel
from vllm_commext.proxy.http.body import LENGTHS
from vllm_commext.proxy.outcome import ProxyError
from vllm_commext.proxy.session import two_step
from vllm_commext.proxy.session.response import Opened, is_dead
from vllm_commext.proxy.session.two_step import AtOnce

logger = logging.getLogger("vllm.commext.proxy")

KEY_BYTES = 16
_PLACE_FIELDS = ("remote_host", "remote_port", "remote_place_seal")
CHECK_SECONDS = 10.0
"""Longest wait for a check of an engine that has broken a connection."""
LOOK_SECONDS = 0.02
MAX_WAITING = 8
"""Requests that wait at decode engines for one prefill engine, which vLLM looks at in every
step."""


def place_or_reason(engine: Engine) -> SideChannel | AtOnce:
    known = engine.capabilities
    if not known.streams:
        return AtOnce.NOT_KNOWN
    first, *others = known.ranks
    if others:
        return AtOnce.SEVERAL
    return AtOnce.BUSY if engine.num_waiting >= MAX_WAITING else first.channel


def refusal(mode: str, body: Mapping[str, Any], decode: Iterable[Engine]) -> AtOnce | None:
    """Reason why a request does not go to both engines at once, or None."""
    if mode == NEVER:
        return AtOnce.OFF
    if 1 in map(body.get, LENGTHS):
        return AtOnce.ONE_TOKEN
    return None if all(one.capabilities.streams for one in decode) else AtOnce.DECODE


def prefill_body(body: Mapping[str, Any], stream_key: str, key: str = "") -> dict[str, Any]:
    step = two_step.prefill_body(body, key)
    step["kv_transfer_params"]["stream_key"] = stream_key
    return step


def decode_body(body: Mapping[str, Any], key: str, place: SideChannel) -> dict[str, Any]:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "stream_key": key,
        **dict(zip(_PLACE_FIELDS, (place.host, place.port, place.seal), strict=True)),
    }
    return two_step.decode_body(body, params)


@dataclass(eq=False)
class Stream:
    """One attempt at both steps at once. way: how it went. *ask* asks a decode engine."""

    _body: Mapping[str, Any]
    _payload: Callable[..., Any]
    _ask: Callable[[Any, Engine], Any]
    way: AtOnce | None = None
    _asked: Engine | None = None
    _place: SideChannel | None = None
    _decode: asyncio.Task[Opened] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._decode is not None

    async def prefill_payload(self, engine: Engine, key: str = "") -> Any:
        """Payload for a prefill engine; asks the decode engine at the same time."""
        await self.cancel()
        if self._place is not None:
            self.way = AtOnce.AGAIN
        place = self.way or place_or_reason(engine)
        if isinstance(place, AtOnce):
            self.way = place
            body = two_step.prefill_body(self._body, key)
            return self._payload(body, is_stream=False)
        self._place, self._asked = place, engine
        engine.num_waiting += 1
        stream_key = secrets.token_hex(KEY_BYTES)
        body = decode_body(self._body, stream_key, place)
        self._decode = asyncio.create_task(self._ask(body, engine))
        body = prefill_body(self._body, stream_key, key)
        return self._payload(body, is_stream=False)

    @property
    def source(self) -> str:
        return self._asked.name if self._asked is not None else ""

    @property
    def is_alone(self) -> bool:
        """The prefill engine is lost, and the decode engine goes on."""
        return self.is_under_way and self.way is AtOnce.ALONE

    async def outlives(self, error: ProxyError) -> bool:
        """True if the decode engine goes on after *error* of a prefill engine that is gone."""
        engine = self._asked
        if engine is None or not (error.kind == "lost" or is_dead(error)):
            return False
        engine.suspect()
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS):
                while engine.suspected and engine.healthy:
                    await asyncio.sleep(LOOK_SECONDS)
        if not engine.healthy:
            self.way = AtOnce.ALONE
        return self.is_alone

    async def check_place(self, params: Mapping[str, Any]) -> None:
        """Let go of the decode engine if the prefill engine's answer names another side channel."""
        engine, place = self._asked, self._place
        if engine is None or place is None:
            return
        told = [params.get(name) for name in _PLACE_FIELDS]
        if None not in told and told != [place.host, place.port, place.seal]:
            engine.capabilities = UNKNOWN
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
        await end_tasks([decode])

    def _leave(self) -> None:
        assert self._asked is not None  # as long as the decode engine is asked
        self._asked.num_waiting -= 1
        self._asked = self._decode = None


def _close(decode: asyncio.Task[Opened]) -> None:
    if decode.cancelled():
        return
    error = decode.exception()
    if error is None:
        decode.result().close()
    elif not isinstance(error, ProxyError):
        logger.error("failed to close a connection to a decode engine", exc_info=error)
