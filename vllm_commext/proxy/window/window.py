"""The window's two answers: the page, and once a second the state that it shows."""

import asyncio
import base64
import hashlib
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import Counter as Metric

from vllm_commext.limits import Limits
from vllm_commext.proxy.engines.discovery import Registry
from vllm_commext.proxy.engines.pool import Engine
from vllm_commext.proxy.outcome import Outcome, Resume
from vllm_commext.proxy.session.metrics import ProxyMetrics
from vllm_commext.proxy.window.history import COLUMNS, SECONDS, History, parts_of

LOOK_SECONDS = 1.0
NUM_SHOWN, NUM_EVENTS = 50, 20
PROMPT_TOKENS = 1024
"""Of the prompt whose measured speed is shown."""


class EngineView:
    """An engine's state with the time of its last change, and its last error with its time."""

    def __init__(self, now: float) -> None:
        self.state, self.since = "", now
        self.error, self.error_at = "", 0.0
        self._prompt_seconds = deque[float](maxlen=61)

    def look(self, engine: Engine, now: float) -> bool:
        """Bring it up to date; True where the state is another one."""
        before, state = self.state, state_of(engine)
        if state != before:
            self.state, self.since = state, now
        if state in ("down", "suspected") and engine.detail != "ok":
            self.error, self.error_at = engine.detail, now
        engine.load.look(time.monotonic())
        self._prompt_seconds.append(engine.load.recent.seconds)
        return state != before

    def as_json(self, engine: Engine, now: float) -> dict[str, Any]:
        load, seen, step = engine.load, self._prompt_seconds, None
        answers, context, cache = load.answers, load.answers.context, load.cache
        if load.speed.knows_steps:
            step = load.speed.step_seconds(max(answers.num_begun, 1), context)
        took = load.speed.prefill_seconds(PROMPT_TOKENS, 0, False) if load.speed.is_known else 0.0
        used = cache.lacking(context + answers.coming + cache.unread, 0.0)[2]
        return {
            **{"name": engine.name, "role": engine.role, "url": engine.url, "state": self.state},
            **{"since": now - self.since, "in_flight": engine.in_flight},
            **{"computing": len(load.prompts.jobs), "waiting": len(load.queue)},
            **{"answers": answers.num_begun, "cache": used / cache.size if cache.size else None},
            "share": (seen[-1] - seen[0]) / max(len(seen) - 1, 1) / LOOK_SECONDS,
            "speed": PROMPT_TOKENS / took if took > 0.0 else None,
            "step": step,
            **{"error": self.error, "error_ago": now - self.error_at if self.error else None},
        }


def state_of(engine: Engine) -> str:
    if not engine.healthy:
        return "down"
    if engine.draining or engine.drains_itself:
        return "draining"
    return "suspected" if engine.suspected else "ready"


class Window:
    """Holds nothing of a prompt or an answer, but ids, engines' names and times."""

    def __init__(self, limits: Limits, registry: Registry, metrics: ProxyMetrics) -> None:
        self._registry, self._metrics = registry, metrics
        self._history = History(limits, time.time())
        self._views: dict[Engine, EngineView] = {}
        self._latest, self._troubled = (
            deque[tuple[float, Outcome]](maxlen=NUM_SHOWN) for _ in range(2)
        )
        self._events = deque[tuple[float, str, str]](maxlen=NUM_EVENTS)
        self._totals = Counter[str]()
        self._state = b""

    def note(self, outcome: Outcome) -> None:
        """Take in a request that has ended."""
        entry = time.monotonic(), outcome
        self._latest.append(entry)
        if not self._history.note(outcome):
            self._troubled.append(entry)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look at the engines and counters once a second."""

        async def look() -> None:
            while True:
                self.look(time.time())
                await asyncio.sleep(LOOK_SECONDS)

        task = asyncio.create_task(look())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def look(self, now: float) -> None:
        self._state = b""
        self._history.advance(now)
        engines, views = self._registry.engines, self._views
        self._views = {one: views.get(one) or EngineView(now) for one in engines}
        for engine, view in self._views.items():
            if view.look(engine, now):
                told = f"{view.state}: {view.error}" if view.state == "down" else view.state
                self._events.appendleft((now, engine.name, told))
        totals = self._counted()
        self._history.count(totals - self._totals)
        self._totals = totals

    def _counted(self) -> Counter[str]:
        metrics = self._metrics
        resumes, moves = _values(metrics.resumes), _values(metrics.moves)
        counts = Counter(_values(metrics.placements))
        counts["resumed"], counts["moved"] = resumes[Resume.RESUMED], moves[Resume.RESUMED]
        counts["lost"] = sum(resumes.values()) - resumes[Resume.RESUMED]
        return counts

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(body=PAGE, headers=HEADERS)

    async def state(self, _: web.Request) -> web.Response:
        if not self._state:
            self._state = msgspec.json.encode(self.as_json(time.time()))
        return web.Response(
            body=self._state,
            headers={"Content-Type": "application/json", "Cache-Control": "no-store"},
        )

    def as_json(self, now: float) -> dict[str, Any]:
        history, passed = self._history, time.monotonic()
        return {
            "now": now,
            "limits": {"first": history.limits.first, "each": history.limits.tpot},
            "engines": [view.as_json(one, now) for one, view in self._views.items()],
            "history": {"seconds": SECONDS, "columns": COLUMNS, "rows": history.rows(now)},
            "minute": history.minute(now),
            "events": tuple(self._events),
            "latest": [_request(passed - ended, one) for ended, one in reversed(self._latest)],
            "troubled": [_request(passed - ended, one) for ended, one in reversed(self._troubled)],
        }


def _values(metric: Metric) -> dict[str, int]:
    """A counter's values by its only label."""
    (family,) = metric.collect()
    samples = [one for one in family.samples if one.name.endswith("_total")]
    return {next(iter(one.labels.values())): int(one.value) for one in samples}


def _request(ago: float, one: Outcome) -> dict[str, Any]:
    route, marks = one.route, one.route.marks
    seconds = marks[-1][0] - one.began if marks else 0.0
    return {
        **{"id": one.request_id, "ago": ago, "kind": one.kind, "side": one.side},
        **{"status": one.status, "seconds": seconds, "first": one.first_token_seconds},
        **{"prompt_tokens": one.prompt_tokens, "tokens": one.tokens, "each": one.per_token},
        **{"path": route.path, "prefill": route.prefill, "decode": route.decode},
        **{"placement": route.placement, "ways": route.ways},
        "parts": [
            (part.name, part.engine, part.began - one.began, part.ended - one.began)
            for part in parts_of(one.began, marks)
        ],
    }


PAGE = (Path(__file__).with_name("page.html")).read_bytes()


def _headers() -> Mapping[str, str]:
    """Only the page's own script and style run, and it reaches only where it came from."""
    found = re.findall(rb"<(script|style)>(.*?)</\1>", PAGE, re.DOTALL)
    rules = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    rules += ["frame-ancestors 'none'", "img-src data:"]
    for name, text in found:
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        rules.append(f"{name.decode()}-src 'sha256-{digest}'")
    return {
        **{"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"},
        **{"Content-Security-Policy": "; ".join(rules), "Referrer-Policy": "no-referrer"},
        "X-Content-Type-Options": "nosniff",
    }


HEADERS = _headers()
