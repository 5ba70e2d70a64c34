"""Background polling of every engine's /health."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp

from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines import Engine, EnginePool

logger = logging.getLogger("vllm.commext.proxy")


class HealthMonitor:
    """Keeps `Engine.healthy` true to what the engines say of themselves."""

    def __init__(
        self, session: aiohttp.ClientSession, config: ProxyConfig, pools: Iterable[EnginePool]
    ) -> None:
        self._session = session
        self._config = config
        self._engines = [engine for pool in pools for engine in pool.engines]
        self._timeout = aiohttp.ClientTimeout(total=config.health_timeout_seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check every engine once, then go on checking in the background."""
        await asyncio.gather(*(self._check(engine) for engine in self._engines))
        watches = [asyncio.create_task(self._watch(engine)) for engine in self._engines]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_seconds)
            await self._check(engine)

    async def _check(self, engine: Engine) -> None:
        was_healthy = engine.healthy
        failure = await self._failure(engine)
        if failure is None:
            engine.passed_check(self._config.health_rise)
        else:
            engine.failed_check(self._config.health_fall, failure)
        if engine.healthy != was_healthy:
            state = "healthy" if engine.healthy else f"unhealthy: {engine.detail}"
            level = logging.INFO if engine.healthy else logging.WARNING
            logger.log(level, "%s (%s) is now %s", engine.name, engine.url, state)

    async def _failure(self, engine: Engine) -> str | None:
        try:
            async with self._session.get(
                f"{engine.url}/health", timeout=self._timeout, allow_redirects=False
            ) as response:
                return None if response.status == 200 else f"/health answered {response.status}"
        except asyncio.TimeoutError:
            return f"/health did not answer within {self._config.health_timeout_seconds} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"/health failed: {error}"
