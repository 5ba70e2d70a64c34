"""Rewrites a request for its two steps, and asks for both at once: D reads while P computes.

An engine's answer carries one `kv_transfer_params`, which names the blocks of one sequence. With
several prompts vLLM would load the first one's blocks for all. With ``n`` above 1 the sample that
first finishes its read frees blocks that others still read. So a request of several sequences goes
to a decode engine as it is.
"""

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
from vllm_commext.proxy.http.body import LENGTHS, RawJson
from vllm_commext.proxy.http.endpoints import COMPLETIONS, Endpoint, prompt_tokens
from vllm_commext.proxy.outcome import ProxyError, bad_request
from vllm_commext.proxy.session.reasons import AtOnce, LocalPrefill
from vllm_commext.proxy.session.response import Opened, is_dead

logger = logging.getLogger("vllm.commext.proxy")

KEY_BYTES = 16
_PLACE_FIELDS = ("remote_host", "remote_port", "remote_place_seal")
CHECK_SECONDS = 10.0
"""Longest wait for a check of an engine that has broken a connection."""
LOOK_SECONDS = 0.02
MAX_WAITING = 8
"""Requests that wait at decode engines for one prefill engine, which vLLM looks at in every
step."""
KEEP_FOR_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# A stop token would end the prefill as "stopped", for which a connector need not hand over blocks;
# the token itself is thrown away.
_NOT_FOR_PREFILL = ("stop_token_ids",)
OWN_IDS = "prompt_token_ids"
"""The member of ``kv_transfer_params`` that clients may set; vLLM checks the ids."""
MAX_SMALL_BYTES = 2 << 20


def checked_body(body: Any) -> dict[str, Any]:
    """Check a client's *body*. Raises `ProxyError` 400."""
    if not isinstance(body, dict):
        raise bad_request(f"expected a JSON object as body, got {type(body).__name__}")
    own = body.get("kv_transfer_params") or {}
    if not isinstance(own, dict):
        raise bad_request("kv_transfer_params: expected an object")
    if own and set(own) != {OWN_IDS}:
        raise bad_request(
            "kv_transfer_params is what this proxy sets to bring the two engines together: "
            f"expected {OWN_IDS} alone, got {sorted(own)[:8]}; remove the others from the request, "
            "or talk to the engines directly"
        )
    sampling = body.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    for name, value in (
        (OWN_IDS, own),
        ("vllm_xargs", body.get("vllm_xargs")),
        ("extra_args", extra),
    ):
        if value:
            _check_small(name, value)
        if isinstance(value, dict) and "kv_transfer_params" in value:
            raise bad_request(f"expected {name} without kv_transfer_params, which this proxy sets")
    return body


def _check_small(name: str, value: Any) -> None:
    inner = value.values() if isinstance(value, dict) else (value,)
    if sum([len(one.text) for one in inner if isinstance(one, RawJson)]) > MAX_SMALL_BYTES:
        raise bad_request(f"expected {name} of at most {MAX_SMALL_BYTES} bytes")


def local_prefill_reason(
    endpoint: Endpoint, body: Mapping[str, Any], min_prompt_tokens: int = 0
) -> LocalPrefill | None:
    """Reason why *body* cannot take two steps, or None. Values of an unexpected type count as one:
    the decode engine judges them."""
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return LocalPrefill.SEVERAL_SAMPLES
    if body.get("use_beam_search"):
        return LocalPrefill.BEAM_SEARCH
    if endpoint is COMPLETIONS and not _is_one_prompt(body):
        return LocalPrefill.NOT_ONE_PROMPT
    if _wants_prompt_logprobs(endpoint, body):
        return LocalPrefill.PROMPT_LOGPROBS
    if not _is_count(body.get("truncate_prompt_tokens")):
        return LocalPrefill.TRUNCATION
    if 0 in map(body.get, LENGTHS):
        return LocalPrefill.NO_GENERATION
    if min_prompt_tokens and prompt_tokens(body) < min_prompt_tokens:
        return LocalPrefill.SHORT_PROMPT
    return None


def _is_one_prompt(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None or not isinstance(prompt, RawJson):
        return False
    is_one_item = prompt.num_items == 1 or prompt.item_kind.isdigit()
    return prompt.kind == '"' or (prompt.kind == "[" and is_one_item)


def _wants_prompt_logprobs(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    if body.get("prompt_logprobs") is not None:
        return True
    echoes = endpoint is COMPLETIONS and bool(body.get("echo"))
    return echoes and body.get("logprobs") is not None


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value >= 0)


def prefill_body(body: Mapping[str, Any], key: str = "", stream_key: str = "") -> dict[str, Any]:
    """Body for one token of the same prompt. All else stays, so that what an engine refuses is
    refused here: with a *key* the client's own limits, too. *stream_key*: D's, which reads at
    once."""
    step = dict(body) if key else _of_one_token(body)
    if body.get("stream"):
        step.pop("stream_options", None)  # an error without streaming
    step["stream"] = False
    step["kv_transfer_params"] = {**_own_params(body), **KEEP_FOR_DECODE}
    if key:
        step["kv_transfer_params"]["prefill_key"] = key
    if stream_key:
        step["kv_transfer_params"]["stream_key"] = stream_key
    return step


def _of_one_token(body: Mapping[str, Any]) -> dict[str, Any]:
    step = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    step.update(max_tokens=1, ignore_eos=True)
    if "max_completion_tokens" in step:
        step["max_completion_tokens"] = 1
    min_tokens = step.get("min_tokens")
    if isinstance(min_tokens, int | float) and min_tokens > 1:
        step["min_tokens"] = 1
    return step


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "kv_transfer_params": {**_own_params(body), **kv_transfer_params}}


def _own_params(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return body.get("kv_transfer_params") or {}


def place_or_reason(engine: Engine) -> SideChannel | AtOnce:
    known = engine.capabilities
    if not known.streams:
        return AtOnce.NOT_KNOWN
    first, *others = known.ranks
    if others:
        return AtOnce.SEVERAL
    return AtOnce.BUSY if engine.num_waiting >= MAX_WAITING else first.channel


def reason_against(mode: str, body: Mapping[str, Any], decode: Iterable[Engine]) -> AtOnce | None:
    """Reason why a request does not go to both engines at once, or None."""
    if mode == NEVER:
        return AtOnce.OFF
    if 1 in map(body.get, LENGTHS):
        return AtOnce.ONE_TOKEN
    return None if all(one.capabilities.streams for one in decode) else AtOnce.DECODE


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
            return self._payload(prefill_body(self._body, key), is_stream=False)
        self._place, self._asked = place, engine
        engine.num_waiting += 1
        stream_key = secrets.token_hex(KEY_BYTES)
        where = zip(_PLACE_FIELDS, (place.host, place.port, place.seal), strict=True)
        params = {"do_remote_prefill": True, "do_remote_decode": False, "stream_key": stream_key}
        body = decode_body(self._body, {**params, **dict(where)})
        self._decode = asyncio.create_task(self._ask(body, engine))
        return self._payload(prefill_body(self._body, key, stream_key), is_stream=False)

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
