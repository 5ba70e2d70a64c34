"""Reading what an engine answers, and turning whatever goes wrong into a `ProxyError`."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from vllm_commext.proxy.config import MIB
from vllm_commext.proxy.engines import PREFILL, Engine, EnginePool
from vllm_commext.proxy.failures import EngineAnswer, ProxyError

MAX_ANSWER_BYTES = 64 * MIB
_CANNOT_CONNECT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_LOST = (aiohttp.ClientError, OSError)


@contextmanager
def failures_of(engine: Engine, timeout_seconds: float) -> Iterator[None]:
    """Raise `ProxyError` for whatever goes wrong inside with *engine*.

    A prefill may be repeated after a lost connection, a decode may not: it may have read the
    blocks, which the prefill engine then has freed.
    """
    side, name = engine.role, engine.name
    try:
        yield
    except _CANNOT_CONNECT as error:
        engine.suspect(f"a request could not connect: {error}")
        message = f"could not connect to {name}: {error}"
        raise ProxyError(
            502, "unreachable", message, side=side, engine=name, can_retry=True
        ) from error
    except asyncio.TimeoutError as error:
        message = f"{name} did not answer within {timeout_seconds} s"
        raise ProxyError(504, "timeout", message, side=side, engine=name) from error
    except _LOST as error:
        engine.suspect(f"a request lost its connection: {error!r}")
        message = f"{name} closed the connection before its answer was complete: {error!r}"
        raise ProxyError(
            502, "lost", message, side=side, engine=name, can_retry=side == PREFILL
        ) from error


async def read_answer(engine: Engine, response: aiohttp.ClientResponse) -> EngineAnswer:
    """The whole body of *response*, up to `MAX_ANSWER_BYTES`."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise bad_answer(engine, f"more than {MAX_ANSWER_BYTES} bytes")
    return EngineAnswer(bytes(body), response.headers.get("Content-Type", "application/json"))


def kv_transfer_params(engine: Engine, status: int, answer: EngineAnswer) -> dict[str, Any] | None:
    """The parameters in a prefill engine's answer, or None if it holds none."""
    if status >= 400:
        message = f"{engine.name} answered {status}"
        raise ProxyError(
            status,
            "engine_error",
            message,
            side=engine.role,
            engine=engine.name,
            can_retry=status >= 500,
            answer=answer,
        )
    try:
        content = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise bad_answer(engine, f"no JSON ({error})") from error
    params = content.get("kv_transfer_params") if isinstance(content, dict) else content
    if status != 200 or not (params is None or isinstance(params, dict)):
        raise bad_answer(engine, f"status {status}, kv_transfer_params {type(params).__name__}")
    return params or None


def bad_answer(engine: Engine, got: str) -> ProxyError:
    message = f"{engine.name}: expected a completion as a vLLM server sends it, got {got}"
    return ProxyError(502, "bad_answer", message, side=engine.role, engine=engine.name)


def no_engine(pool: EnginePool) -> ProxyError:
    message = (
        f"no healthy {pool.role} engine among {len(pool.engines)}; the proxy's /health says why"
    )
    return ProxyError(503, "no_engine", message, side=pool.role)
