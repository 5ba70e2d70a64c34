"""Checks of every engine's /health, and what its metrics page says that it can."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from vllm_commext.drain import HEADER
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines.engine import Capabilities, Engine, Rank, SideChannel
from vllm_commext.proxy.errors_phases import complaints, lack, reason_of

logger = logging.getLogger("vllm.commext.proxy")

# After a suspicion the engine is checked at once; so soon is it not checked for another one.
_MIN_INTERVAL_SECONDS = 0.05
_STARTS, _START_SECONDS = 8, 0.005
"""Checks that begin in so long: those of many engines come one after the other."""
MAX_PAGE_BYTES = 4 << 20
MAX_LINE_BYTES = 4 << 10
MAX_LINES = 1024
"""Of an engine's metrics page: bytes that are read, of a line, and lines that are kept."""

INFO_METRIC, STREAMS_METRIC = "vllm:commext_nixl_info", "vllm:commext_nixl_streams"
CACHE_METRIC, CACHE_USE_METRIC = "vllm:cache_config_info", "vllm:kv_cache_usage_perc"
STEPS_METRIC = "vllm:iteration_tokens_total_count"
PAGE_NAMES = (INFO_METRIC, STREAMS_METRIC, CACHE_METRIC, CACHE_USE_METRIC, STEPS_METRIC)
"""Read from an engine's metrics page."""
_LINE = re.compile(r"[\w:]+\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_ESCAPE = re.compile(r'\\[\\"n]')
_LABELS = frozenset(("engine", "host", "port", "seal", "streams", "reuse", "releases"))
_WANTED = re.compile(rb"^(?:%s)\{.*" % "|".join(PAGE_NAMES).encode(), re.MULTILINE)


def failed_check(engine: Engine, fall: int, detail: str) -> None:
    """Count a failed check: *fall* in a row are enough, or one after a lost connection."""
    state = engine.state
    if state.count_failure() >= fall or state.suspected or not state.healthy:
        engine.fall(detail)


class HealthMonitor:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: ProxyConfig,
        reads_cache: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session, self._config, self._reads_cache = session, config, reads_cache
        timeout = aiohttp.ClientTimeout(total=config.health_timeout_seconds)
        self._bounds: dict[str, Any] = {"timeout": timeout, "allow_redirects": False}
        self._watches: dict[Engine, asyncio.Task[None]] = {}
        self._starts = asyncio.Semaphore(_STARTS)

    @asynccontextmanager
    async def running(self, engines: Sequence[Engine]) -> AsyncIterator[None]:
        """Check each of *engines* once, then go on checking in the background."""
        await asyncio.gather(*(self._check(engine) for engine in engines))
        for engine in engines:
            self.watch(engine)
        try:
            yield
        finally:
            watches = list(self._watches.values())
            for engine in list(self._watches):
                self.forget(engine)
            await asyncio.gather(*watches, return_exceptions=True)

    def watch(self, engine: Engine) -> None:
        self._watches[engine] = asyncio.create_task(self._watch(engine))

    def forget(self, engine: Engine) -> None:
        self._watches.pop(engine).cancel()

    async def _watch(self, engine: Engine) -> None:
        loop, state = asyncio.get_running_loop(), engine.state
        last_answered = loop.time()
        if not state.healthy and state.num_failed == 0:
            state.doubted.set()
        while self._watches.get(engine) is asyncio.current_task():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_interval_seconds):
                    await state.doubted.wait()
                    await asyncio.sleep(_MIN_INTERVAL_SECONDS)
            state.doubted.clear()
            if await self._check(engine):
                last_answered = loop.time()
            elif loop.time() - last_answered >= self._config.engine_lost_seconds:
                engine.lose()

    async def _check(self, engine: Engine) -> bool:
        """Check once; True if *engine* answered, well or not."""
        async with self._starts:
            await asyncio.sleep(_START_SECONDS)
        state, was_healthy = engine.state, engine.state.healthy
        try:
            status, drains, failure = await self._ask(engine)
        except OSError as error:  # nothing is known of the engine
            complaints.warning("descriptors", f"{engine.name} could not be checked: {error}")
            return True
        if drains:
            engine.note_drain()
        elif failure is None:
            if not was_healthy:
                await self._learn_page(engine)  # before it gets work
            state.pass_check()
            if was_healthy:  # by now, what requests find out meanwhile is newer than the check
                await self._learn_page(engine)
        else:
            failed_check(engine, self._config.health_fall, failure)
        if state.healthy != was_healthy:
            told = "healthy" if state.healthy else f"unhealthy: {state.detail}"
            level = logging.INFO if state.healthy else logging.WARNING
            logger.log(level, "%s (%s) is now %s", engine.name, engine.url, told)
        return status is not None

    async def _learn_page(self, engine: Engine) -> None:
        """Read an engine's capabilities once, and the use of its KV cache each time."""
        is_known, reads_cache = engine.capabilities.is_known, self._reads_cache()
        if is_known and not reads_cache:
            return
        try:
            url, bounds = f"{engine.url}/metrics", self._bounds
            async with self._session.get(url, raise_for_status=True, **bounds) as response:
                page = await _wanted(response.content)
            if not is_known:
                engine.learn(read_capabilities(page))
            if reads_cache and (cache := read_cache(page)):
                engine.load.note_cache(*cache)
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            logger.info("%s (%s) does not say what it offers: %s", engine.name, engine.url, error)

    async def _ask(self, engine: Engine) -> tuple[int | None, bool, str | None]:
        """Status of /health, true if the engine drains, and the failure, if any."""
        try:
            async with self._session.get(f"{engine.url}/health", **self._bounds) as response:
                failure = None if response.status == 200 else f"/health answered {response.status}"
                return response.status, HEADER in response.headers, failure
        except TimeoutError:
            seconds = self._config.health_timeout_seconds
            return None, False, f"/health did not answer within {seconds} s"
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            if lacked := lack(error):
                raise OSError(lacked) from error
            return None, False, f"/health failed: {reason_of(error)}"


async def _wanted(content: aiohttp.StreamReader) -> str:
    """Lines of a metrics page that are wanted here, read piece by piece. Raises `ValueError` for a
    page that is too large."""
    found: list[bytes] = []
    rest, num_bytes = b"", 0
    async for piece in content.iter_any():
        num_bytes += len(piece)
        lines, _, rest = (rest + piece).rpartition(b"\n")
        found += _WANTED.findall(lines)
        if num_bytes > MAX_PAGE_BYTES or len(rest) > MAX_LINE_BYTES or len(found) > MAX_LINES:
            raise ValueError(
                f"expected a metrics page of at most {MAX_PAGE_BYTES} bytes, with lines of at most "
                f"{MAX_LINE_BYTES} and {MAX_LINES} of them about this, got more"
            )
        await asyncio.sleep(0)
    return b"\n".join((*found, rest)).decode(errors="replace")


def _samples(page: str, name: str) -> list[tuple[Mapping[str, str], float]]:
    """Labels and value of each."""
    samples: list[tuple[Mapping[str, str], float]] = []
    for line in page.splitlines():
        if line.startswith(name + "{"):
            if (found := _LINE.match(line)) is None:
                raise ValueError(f"expected NAME{{LABELS}} VALUE, got {line[:80]!r}")
            labels = {
                label: _ESCAPE.sub(lambda one: _ESCAPES[one[0]], value)
                for label, value in _LABEL.findall(found[1])
            }
            samples.append((labels, float(found[2])))
    return samples


def read_capabilities(page: str) -> Capabilities:
    """Read a metrics page; raises `ValueError` where it is none."""
    without = {
        labels.get("engine") for labels, value in _samples(page, STREAMS_METRIC) if value == 0
    }
    ranks: list[Rank] = []
    for labels, _ in _samples(page, INFO_METRIC):
        if missing := _LABELS - labels.keys():
            raise ValueError(f"expected {INFO_METRIC} with labels {sorted(missing)}, too")
        channel = SideChannel(labels["host"], int(labels["port"]), labels["seal"])
        flags = {name: labels[name] == "1" for name in ("streams", "reuse", "releases")}
        flags["streams"] &= labels["engine"] not in without
        ranks.append(Rank(labels["engine"], channel, **flags))
    settings = {one.get("enable_prefix_caching") for one, _ in _samples(page, CACHE_METRIC)}
    caches, forgets = "True" in settings and len(ranks) == 1, settings == {"False"}
    return Capabilities(tuple(ranks), is_known=True, caches=caches, forgets=forgets)


def read_cache(page: str) -> tuple[float, float, float] | None:
    """Tokens of room in the KV caches of all ranks, tokens in use, and steps so far; None where
    the page does not say. Raises `ValueError`."""
    sizes = [one.get("kv_cache_size_tokens", "") for one, _ in _samples(page, CACHE_METRIC)]
    use = [value for _, value in _samples(page, CACHE_USE_METRIC)]
    if not (sizes and sizes[0].isdigit() and use):
        return None
    each = int(sizes[0])
    return each * len(use), each * sum(use), sum(num for _, num in _samples(page, STEPS_METRIC))
