"""Requests that go to a prefill and to a decode engine at once, which reads chunk by chunk what
the other computes.

A decode engine has to be told where to ask for a prompt before the prefill engine has answered.
Where that is, a prefill engine's earlier answers have said; that it can, a decode engine's page of
metrics says.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm_commext.proxy import two_step
from vllm_commext.proxy.failures import ProxyError
from vllm_commext.proxy.reasons import AtOnce
from vllm_commext.proxy.tasks import end_tasks

if TYPE_CHECKING:
    from vllm_commext.proxy.opening import Opened

logger = logging.getLogger("vllm.commext.proxy")

AUTO, NEVER = MODES = ("auto", "never")
"""Which requests go to both at once: all that can, none."""

KEY_BYTES = 16
METRIC = "vllm:commext_nixl_stream_chunks"
MAX_WAITING = 8
"""Requests at decode engines that wait for one prefill engine: vLLM looks at each in every step,
and a prefill engine computes few prompts at a time."""


@dataclass(frozen=True)
class SideChannel:
    """A prefill engine's side channel, and what proves to decode engines that it is one, "" where
    they share no secret."""

    host: str
    port: int
    seal: str


class Streams:
    """What one engine says of streams.

    place: where its last answer says that its prompts can be read. reads: its page of metrics says
    that it reads prompts while they are computed. num_waiting: decode engines' answers that wait
    for what it computes.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.clear()

    def learn(self, params: Any) -> None:
        """Take the parameters in an answer of the engine's."""
        match params:
            case {
                "remote_host": str(host),
                "remote_port": int(port),
                "remote_place_seal": str(seal),
                "remote_chunk_tokens": int(),
            }:
                place = SideChannel(host, port, seal)
            case _:
                return
        self._is_one = self._is_one and self.place in (None, place)
        self.place = place

    def learn_page(self, page: str) -> None:
        """Take the engine's page of metrics."""
        lines = (line for line in page.splitlines() if line.startswith(METRIC + "{"))
        self.reads = any(line.rpartition(" ")[2] in ("1", "1.0") for line in lines)

    def clear(self) -> None:
        """The engine may be another one from now on."""
        self.place: SideChannel | None = None
        self._is_one = True
        self.reads = False

    def place_or_reason(self) -> SideChannel | AtOnce:
        """Where one more prompt is read while it is computed, or why it is not."""
        if self.place is None:
            return AtOnce.NOT_KNOWN
        if not self._is_one:
            return AtOnce.SEVERAL
        return AtOnce.BUSY if self.num_waiting >= MAX_WAITING else self.place


def refusal(mode: str, body: Mapping[str, Any], decode: Iterable[Streams]) -> AtOnce | None:
    """Why such a request does not go to both engines at once, whichever prefill engine takes it;
    None if it may. decode: of the engines that one may be chosen from."""
    if mode == NEVER:
        return AtOnce.OFF
    if any(body.get(name) == 1 for name in ("max_tokens", "max_completion_tokens")):
        return AtOnce.ONE_TOKEN
    return None if all(one.reads for one in decode) else AtOnce.DECODE


def prefill_body(
    body: Mapping[str, Any],
    stream_key: str,
    places: Sequence[Mapping[str, Any]] = (),
    key: str = "",
) -> dict[str, Any]:
    """*body* for the prefill engine, which may know it by a *key*, too."""
    step = two_step.prefill_body(body, places, key)
    step["kv_transfer_params"]["stream_key"] = stream_key
    return step


def decode_body(body: Mapping[str, Any], key: str, place: SideChannel) -> dict[str, Any]:
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
    """One request's attempt at both steps at once. way: how it went.

    decode: the decode engine's answer, begun by *ask* with its payload once a prefill engine is
    known that streams; None before. places: side channels of engines that may have blocks of the
    prompt.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        payload: Payloads,
        ask: Callable[[Any], Any],
        *,
        refusal: AtOnce | None = None,
        places: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._places = places
        self._body = body
        self._payload = payload
        self._ask = ask
        self._asked: Streams | None = None
        self._place: SideChannel | None = None
        self.way = refusal
        self._decode: asyncio.Task[Opened] | None = None

    @property
    def is_under_way(self) -> bool:
        """A decode engine has been asked, and its answer was not taken yet."""
        return self._decode is not None

    async def prefill_payload(self, streams: Streams, key: str = "") -> Any:
        """What a prefill engine is asked that knows it by a *key*; the decode engine is asked at
        the same time."""
        await self.cancel()
        if self._place is not None:
            self.way = AtOnce.AGAIN
        place = self.way or streams.place_or_reason()
        if isinstance(place, AtOnce):
            self.way = place
            body = two_step.prefill_body(self._body, self._places, key)
            return self._payload(body, is_stream=False)
        self._place, self._asked = place, streams
        streams.num_waiting += 1
        stream_key = secrets.token_hex(KEY_BYTES)
        payload = self._payload(decode_body(self._body, stream_key, place))
        self._decode = asyncio.create_task(self._ask(payload))
        body = prefill_body(self._body, stream_key, self._places, key)
        return self._payload(body, is_stream=False)

    async def check_place(self) -> None:
        """The prefill engine has answered: let go of the decode engine if it was told of another
        side channel than that one's."""
        if self._asked is not None and self._asked.place != self._place:
            await self.cancel()
            self.way = AtOnce.SEVERAL

    async def opened(self) -> "Opened | ProxyError":
        """The decode engine's answer, which is the caller's to close, or why there is none."""
        assert self._decode is not None  # asked for where it is under way
        try:
            opened = await asyncio.shield(self._decode)
        except ProxyError as error:
            self.way = AtOnce.FAILED
            self._leave()
            return error
        self.way = AtOnce.STREAMED
        self._leave()
        return opened

    async def cancel(self) -> None:
        """Let go of the decode engine, which aborts what it has not finished."""
        decode = self._decode
        if decode is None:
            return
        self._leave()
        decode.add_done_callback(_close)  # also where this task is cancelled meanwhile
        await end_tasks([decode])

    def _leave(self) -> None:
        """The decode engine's answer is taken, or nobody's."""
        assert self._asked is not None  # as long as the decode engine is asked
        self._asked.num_waiting -= 1
        self._asked = self._decode = None


def _close(decode: "asyncio.Task[Opened]") -> None:
    """Nobody takes a decode engine's answer."""
    if decode.cancelled():
        return
    error = decode.exception()
    if error is None:
        decode.result().close()
    elif not isinstance(error, ProxyError):
        logger.error("a decode engine could not be let go", exc_info=error)
