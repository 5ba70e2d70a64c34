"""Reads a request's body within bounds: its time, its bytes, and the bytes of all bodies. Refuses
what a client may not set."""

import asyncio
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vllm_commext.proxy.errors_phases import ProxyError, bad_request
from vllm_commext.proxy.http import json_members
from vllm_commext.proxy.http.json_members import STEP_SECONDS, RawJson, in_steps

OWN_IDS = "prompt_token_ids"
"""The member of ``kv_transfer_params`` that clients may set; vLLM checks the ids."""
MAX_SMALL_BYTES = 2 << 20
SMALL_BODY_BYTES = 1 << 20
_FOR_SMALL_BODIES = 8
"""One such part of the budget is kept for bodies of at most `SMALL_BODY_BYTES`."""


class BodyBudget:
    """Bytes of request bodies at a time: *max_bytes*, and *most* of each, in *seconds* and one more
    for each *rate* bytes. turns: held while a large body is parsed, and as long after, so that
    others have half of the processor."""

    def __init__(self, max_bytes: int, most: int, seconds: float, rate: int) -> None:
        self._max_bytes, self.most, self.seconds, self.rate = max_bytes, most, seconds, rate
        self.held_bytes = 0
        self.turns = asyncio.Lock()

    def take(self, num_bytes: int, body_bytes: int) -> None:
        """Raises `ProxyError` 503 if *num_bytes* more are too many."""
        is_small = body_bytes <= SMALL_BODY_BYTES
        most = self._max_bytes - (0 if is_small else self._max_bytes // _FOR_SMALL_BODIES)
        if self.held_bytes + num_bytes > most:
            message = f"request bodies take {self.held_bytes} bytes of {most}; retry"
            raise ProxyError(503, "overloaded", message)
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


@dataclass(eq=False)
class Intake:
    """One request's body, and its share of the budget until `close`."""

    _budget: BodyBudget
    num_bytes: int = 0
    body: Any = None

    async def read(self, request: web.Request) -> None:
        """Read and parse the body. Raises `ProxyError`."""
        if request.content_type != "application/json":
            message = f"expected Content-Type: application/json, got {request.content_type!r}"
            raise ProxyError(415, "bad_request", message)
        seconds, rate = self._budget.seconds, self._budget.rate
        try:
            if request.content.is_eof():  # as of most, which come with their heads
                raw = self._more(b"", request.content.read_nowait(), request)
            else:
                async with asyncio.timeout(seconds) as bound:
                    raw = await self._read_raw(request, bound)
        except TimeoutError as error:
            message = (
                f"the request's body did not arrive within {seconds} s and a second for each "
                f"{rate} bytes: got {self.num_bytes} bytes"
            )
            raise ProxyError(408, "bad_request", message) from error
        try:
            self.body = await self._decoded(raw)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the body is not valid JSON: {error}") from error

    def close(self) -> None:
        self._budget.give_back(self.num_bytes)
        self.num_bytes, self.body = 0, None

    async def _read_raw(self, request: web.Request, bound: asyncio.Timeout) -> bytes | bytearray:
        end, raw = bound.when(), self._more(b"", b"", request)
        assert end is not None  # as every body has a bound
        async for piece in request.content.iter_any():
            raw = self._more(raw, piece, request)
            bound.reschedule(end + self.num_bytes / self._budget.rate)
        return raw

    def _more(
        self, raw: bytes | bytearray, piece: bytes, request: web.Request
    ) -> bytes | bytearray:
        most, num_bytes = self._budget.most, len(raw) + len(piece)
        num_all = max(request.content_length or 0, num_bytes)
        if num_all > most:
            raise ProxyError(413, "bad_request", f"expected a body of at most {most} bytes")
        self._budget.take(len(piece), num_all)
        self.num_bytes = num_bytes
        if not isinstance(raw, bytearray):
            return bytearray(raw + piece) if raw else piece
        raw += piece
        return raw

    async def _decoded(self, raw: bytes | bytearray) -> Any:
        taking_apart = json_members.members_of(raw)
        if len(raw) <= json_members.LARGE_BODY_BYTES:
            return await in_steps(taking_apart)
        return await in_steps(taking_apart, self._budget.turns, STEP_SECONDS)


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
