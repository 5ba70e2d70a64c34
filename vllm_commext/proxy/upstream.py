"""Asking the engines: which one, how long to wait, and what counts as whose failure."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from vllm_commext.proxy.answers import failures_of, kv_transfer_params, no_engine, read_answer
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.deadline import Deadline
from vllm_commext.proxy.engines import Engine, EnginePool
from vllm_commext.proxy.failures import EngineAnswer, ProxyError
from vllm_commext.proxy.metrics import ProxyMetrics

logger = logging.getLogger("vllm.commext.proxy")

T = TypeVar("T")
PICK_INTERVAL_SECONDS = 0.05


@dataclass(frozen=True)
class Prefilled:
    """What a prefill step gave. kv_transfer_params is None if the engine returned none."""

    engine: Engine
    kv_transfer_params: dict[str, Any] | None


def open_session() -> aiohttp.ClientSession:
    """A session of one connection a request.

    Closing the connection is how an abort reaches an engine, and a kept one that the engine
    closes at the wrong moment would lose a request that must not be sent twice.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    headers = {"Accept-Encoding": "identity"}
    return aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False)


class Upstream:
    """The two steps, each with its bounds, its retries and its failures told apart."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: ProxyConfig,
        prefill: EnginePool,
        decode: EnginePool,
        metrics: ProxyMetrics,
    ) -> None:
        self._session = session
        self._config = config
        self._prefill_pool = prefill
        self._decode_pool = decode
        self._metrics = metrics

    async def prefill(self, path: str, payload: bytes, headers: Mapping[str, str]) -> Prefilled:
        """Step 1 on the best prefill engine; on another one if that cannot be reached or
        answers 5xx. Raises `ProxyError`."""

        async def ask(engine: Engine) -> Prefilled:
            return await self._prefill_on(engine, path, payload, headers)

        began = time.monotonic()
        result = await self._ask(self._prefill_pool, self._config.prefill_attempts, ask)
        self._metrics.prefill_seconds.observe(time.monotonic() - began)
        return result

    @asynccontextmanager
    async def decode(
        self, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[Engine, aiohttp.ClientResponse]]:
        """Step 2: a decode engine and its response, headers read and body not.

        Another engine is asked only while none could be connected to. Leaving the context
        closes the connection, which makes the engine abort what it has not finished.
        """

        async def ask(engine: Engine) -> tuple[Engine, aiohttp.ClientResponse]:
            return engine, await self._open_decode(engine, path, payload, headers)

        began = time.monotonic()
        engine, response = await self._ask(self._decode_pool, self._config.decode_attempts, ask)
        try:
            self._metrics.decode_headers_seconds.observe(time.monotonic() - began)
            yield engine, response
        finally:
            engine.in_flight -= 1
            response.close()

    async def get(self, path: str, headers: Mapping[str, str]) -> tuple[int, EngineAnswer]:
        """*path* from a decode engine, or from a prefill engine if none is healthy."""
        engine = self._decode_pool.pick() or self._prefill_pool.pick()
        if engine is None:
            raise no_engine(self._decode_pool)
        seconds = self._config.health_timeout_seconds
        timeout = aiohttp.ClientTimeout(total=seconds)
        with failures_of(engine, seconds):
            async with self._session.get(
                engine.url + path, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await read_answer(engine, response)

    async def _ask(
        self, pool: EnginePool, num_attempts: int, ask: Callable[[Engine], Awaitable[T]]
    ) -> T:
        tried: list[Engine] = []
        failure: ProxyError | None = None
        while len(tried) < num_attempts and (engine := await self._pick(pool, tried)):
            if failure is not None:
                self._metrics.retries.labels(pool.role).inc()
            tried.append(engine)
            try:
                return await ask(engine)
            except ProxyError as error:
                level = logging.WARNING if error.status >= 500 else logging.INFO
                logger.log(level, "%s failed: %s", engine.name, error)
                if not error.can_retry:
                    raise
                failure = error
        raise failure or no_engine(pool)

    async def _pick(self, pool: EnginePool, tried: Sequence[Engine]) -> Engine | None:
        """An engine not tried yet. A role without any is given a moment: after an outage, the
        engine is back before the next check tells."""
        end = time.monotonic() + self._config.engine_wait_seconds
        while (engine := pool.pick(exclude=tried)) is None and not tried:
            if time.monotonic() >= end:
                break
            await asyncio.sleep(PICK_INTERVAL_SECONDS)
        return engine

    async def _prefill_on(
        self, engine: Engine, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> Prefilled:
        bound = self._config.connect_timeout_seconds
        timeout = aiohttp.ClientTimeout(
            total=self._config.prefill_timeout_seconds, connect=bound, sock_connect=bound
        )
        engine.in_flight += 1
        try:
            with failures_of(engine, self._config.prefill_timeout_seconds):
                async with self._session.post(
                    engine.url + path,
                    data=payload,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                ) as response:
                    answer = await read_answer(engine, response)
                    return Prefilled(engine, kv_transfer_params(engine, response.status, answer))
        finally:
            engine.in_flight -= 1

    async def _open_decode(
        self, engine: Engine, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        bound = self._config.connect_timeout_seconds
        timeout = aiohttp.ClientTimeout(total=None, connect=bound, sock_connect=bound)
        engine.in_flight += 1
        try:
            seconds = self._config.decode_timeout_seconds
            with failures_of(engine, seconds), Deadline(seconds):
                return await self._session.post(
                    engine.url + path,
                    data=payload,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                )
        except BaseException:
            engine.in_flight -= 1
            raise
