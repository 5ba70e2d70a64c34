"""Requests that go to a prefill and to a decode engine at once, which reads chunk by chunk what
the other computes.

A decode engine has to be told where to ask for a prompt before the prefill engine has answered.
Where that is, a prefill engine's earlier answers have said.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm_commext.proxy import two_step
from vllm_commext.proxy.failures import ProxyError
from vllm_commext.proxy.tasks import end_tasks

if TYPE_CHECKING:
    from vllm_commext.proxy.opening import Opened

logger = logging.getLogger("vllm.commext.proxy")

STREAMED = "streamed"
OFF = "off"
NOT_KNOWN = "not_known"
SEVERAL = "several"
SHORT_PROMPT = "short_prompt"
AGAIN = "again"
FAILED = "failed"
WAYS = (STREAMED, OFF, NOT_KNOWN, SEVERAL, SHORT_PROMPT, AGAIN, FAILED)
"""How a request that takes two steps takes them: both at once; or one after the other, as that is
off, as the prefill engine has not said yet that it streams and where, as several side channels
answer for it, as the prompt is one chunk, as the request is served anew; or, after both at once,
once more one after the other, as the decode engine has failed."""

KEY_BYTES = 16


@dataclass(frozen=True)
class Place:
    """A prefill engine's side channel, and what proves to decode engines that it is one, "" where
    they share no secret. chunk_tokens: prompts of more take several chunks."""

    host: str
    port: int
    seal: str
    chunk_tokens: int


class Streams:
    """What one prefill engine's answers say of where its prompts can be read."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._is_one = True

    def learn(self, params: Any) -> None:
        """Take the parameters in an answer of the engine's."""
        match params:
            case {
                "remote_host": str(host),
                "remote_port": int(port),
                "remote_place_seal": str(seal),
                "remote_chunk_tokens": int(chunk_tokens),
            }:
                place = Place(host, port, seal, chunk_tokens)
            case _:
                return
        self._is_one = self._is_one and self._place in (None, place)
        self._place = place

    def clear(self) -> None:
        """The engine may be another one from now on."""
        self._place, self._is_one = None, True

    def place_for(self, tokens: int) -> Place | str:
        """Where a prompt of about so many tokens is read while it is computed, or why it is not,
        one of `WAYS`."""
        if self._place is None:
            return NOT_KNOWN
        if not self._is_one:
            return SEVERAL
        return self._place if tokens > self._place.chunk_tokens else SHORT_PROMPT


def prefill_body(
    body: Mapping[str, Any], key: str, places: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """*body* for the prefill engine."""
    step = two_step.prefill_body(body, places)
    step["kv_transfer_params"]["stream_key"] = key
    return step


def decode_body(body: Mapping[str, Any], key: str, place: Place) -> dict[str, Any]:
    """*body* for the decode engine, before the prefill engine has answered."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "stream_key": key,
        "remote_host": place.host,
        "remote_port": place.port,
        "remote_place_seal": place.seal,
    }
    return two_step.decode_body(body, params)


class Payloads(Protocol):
    """Makes what is posted to an engine."""

    def __call__(self, body: Mapping[str, Any], is_stream: bool | None = None) -> Any: ...


class Stream:
    """One request's attempt at both steps at once. way: how it went, one of `WAYS`.

    decode: the decode engine's answer, begun by *ask* with its payload once a prefill engine is
    known that streams; None before. places: side channels of engines that may have blocks of the
    prompt.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        tokens: int,
        payload: Payloads,
        ask: Callable[[Any], Any],
        *,
        refusal: str = "",
        places: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._places = places
        self._body = body
        self._tokens = tokens
        self._payload = payload
        self._ask = ask
        self._has_begun = False
        self.way = refusal
        self._decode: asyncio.Task[Opened] | None = None

    @property
    def is_under_way(self) -> bool:
        """A decode engine has been asked, and its answer was not taken yet."""
        return self._decode is not None

    async def prefill_payload(self, streams: Streams) -> Any:
        """What a prefill engine is asked; the decode engine is asked at the same time."""
        await self.cancel()
        if self._has_begun:
            self.way = AGAIN
        place = self.way or streams.place_for(self._tokens)
        if isinstance(place, str):
            self.way = place
            return self._payload(two_step.prefill_body(self._body, self._places), is_stream=False)
        self._has_begun = True
        key = secrets.token_hex(KEY_BYTES)
        payload = self._payload(decode_body(self._body, key, place))
        self._decode = asyncio.create_task(self._ask(payload))
        return self._payload(prefill_body(self._body, key, self._places), is_stream=False)

    async def opened(self) -> "Opened | ProxyError":
        """The decode engine's answer, which is the caller's to close, or why there is none."""
        assert self._decode is not None  # asked for where it is under way
        try:
            opened = await asyncio.shield(self._decode)
        except ProxyError as error:
            self.way, self._decode = FAILED, None
            return error
        self.way, self._decode = STREAMED, None
        return opened

    async def cancel(self) -> None:
        """Let go of the decode engine, which aborts what it has not finished."""
        decode, self._decode = self._decode, None
        if decode is None:
            return
        decode.add_done_callback(_close)  # also where this task is cancelled meanwhile
        await end_tasks([decode])


def _close(decode: "asyncio.Task[Opened]") -> None:
    """Nobody takes a decode engine's answer."""
    if decode.cancelled():
        return
    error = decode.exception()
    if error is None:
        decode.result().close()
    elif not isinstance(error, ProxyError):
        logger.error("a decode engine could not be let go", exc_info=error)
