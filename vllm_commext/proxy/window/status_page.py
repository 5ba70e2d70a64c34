"""The window's two answers: the page, and once a second the state that it shows, with requests of
the last minutes in buckets of some seconds."""

import asyncio
import base64
import hashlib
import math
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from vllm_commext.limits import Limits
from vllm_commext.proxy.engines.engine import Engine
from vllm_commext.proxy.errors_phases import Outcome, parts_of

LOOK_SECONDS = 1.0
SECONDS, NUM_BUCKETS = 5, 120
MINUTE = 60 // SECONDS
COUNTED = ("local", "handed_over", "least_work", "resumed", "moved", "lost")
"""Placements by kind; streams resumed, moved, and lost as no other engine went on with them."""
COLUMNS = (
    *("rate", "refused", "failed", "first_p50", "first_p99", "each_p50", "each_p99", "in_time"),
    *COUNTED,
)
NUM_SHOWN, NUM_EVENTS = 50, 20
PROMPT_TOKENS = 1024
"""Of the prompt whose measured speed is shown."""
_GROWTH = math.log(1.05)


class Times:
    """Seconds, to 2.5 %."""

    def __init__(self, parts: Iterable["Times"] = ()) -> None:
        self._bins = Counter[int]()
        for one in parts:
            self._bins.update(one._bins)

    def add(self, seconds: float) -> None:
        self._bins[round(math.log(max(seconds, 1e-6)) / _GROWTH)] += 1

    def quantiles(self, *shares: float) -> list[float | None]:
        """Seconds that each of *shares*, in ascending order, was within; None without any."""
        total, passed, found = self._bins.total(), 0, list[float | None]()
        for number in sorted(self._bins):
            passed += self._bins[number]
            while len(found) < len(shares) and passed >= shares[len(found)] * total:
                found.append(math.exp(number * _GROWTH))
        return found or [None] * len(shares)


@dataclass
class Bucket:
    """counts: of `COUNTED`, and of requests: ended; refused by 503; failed by anything else that no
    client caused; timed streams, and those of them in_time. first, each: seconds to the first
    token, and for each other."""

    number: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    first: Times = field(default_factory=Times)
    each: Times = field(default_factory=Times)

    def row(self, seconds: float, has_limits: bool) -> list[float | None]:
        """Values of `COLUMNS`."""
        counts = self.counts
        has_share = has_limits and counts["timed"]
        return [
            *(counts["ended"] / seconds, counts["refused"], counts["failed"]),
            *(*self.first.quantiles(0.5, 0.99), *self.each.quantiles(0.5, 0.99)),
            counts["in_time"] / counts["timed"] if has_share else None,
            *(counts[name] for name in COUNTED),
        ]


class History:
    """Pure: every time is an argument."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self._has_limits = bool(limits.tpot or limits.first)
        self._buckets = deque([Bucket(int(now // SECONDS))], maxlen=NUM_BUCKETS)
        self._rows = deque[list[float | None]](maxlen=NUM_BUCKETS - 1)
        self._began = now

    def advance(self, now: float) -> None:
        """Begin the buckets that are due."""
        number = int(now // SECONDS)
        while (last := self._buckets[-1]).number < number:
            self._rows.append(last.row(self._covered(last, now), self._has_limits))
            skipped = max(last.number + 1, number - NUM_BUCKETS + 1)
            self._buckets.append(Bucket(skipped))

    def note(self, outcome: Outcome) -> bool:
        """Count a request that has ended; False where it failed or came late."""
        bucket, has_failure = self._buckets[-1], outcome.has_failed
        counts, first = bucket.counts, outcome.first_token_seconds
        counts["ended"] += 1
        if outcome.status == 503 or has_failure:
            counts["refused" if outcome.status == 503 else "failed"] += 1
        if not outcome.tokens or first is None:
            return not has_failure
        bucket.first.add(first)
        if outcome.tokens > 1:
            bucket.each.add(outcome.per_token)
        is_in_time = self.limits.allow(outcome.per_token, first)
        counts["timed"] += 1
        counts["in_time"] += is_in_time
        return is_in_time and not has_failure

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to `COUNTED`."""
        self._buckets[-1].counts.update(counts)

    def rows(self, now: float) -> list[list[float | None]]:
        """Values of `COLUMNS` in each bucket, the latest one last."""
        last = self._buckets[-1]
        return [*self._rows, last.row(self._covered(last, now), self._has_limits)]

    def minute(self, now: float) -> list[float | None]:
        """Values of `COLUMNS` in the last minute."""
        parts = list(self._buckets)[-MINUTE:]
        counts = sum((one.counts for one in parts), Counter[str]())
        first, each = Times(one.first for one in parts), Times(one.each for one in parts)
        since = max(parts[0].number * SECONDS, self._began)
        return Bucket(0, counts, first, each).row(max(now - since, 1.0), self._has_limits)

    def _covered(self, bucket: Bucket, now: float) -> float:
        """Seconds of a bucket that have passed, at least one."""
        begin = max(bucket.number * SECONDS, self._began)
        return max(min(now, (bucket.number + 1) * SECONDS) - begin, 1.0)


class EngineView:
    """An engine's state with the time of its last change."""

    def __init__(self, now: float) -> None:
        self.state, self.since = "", now
        self._prompt_seconds = deque[float](maxlen=61)

    def look(self, engine: Engine, now: float) -> bool:
        """Bring it up to date; True where the state is another one."""
        before, state = self.state, state_of(engine)
        if state != before:
            self.state, self.since = state, now
        engine.load.look(time.monotonic())
        self._prompt_seconds.append(engine.load.recent.seconds)
        return state != before

    def as_json(self, engine: Engine, now: float) -> dict[str, Any]:
        load, seen, step = engine.load, self._prompt_seconds, None
        answers, context, cache = load.answers, load.answers.context, load.cache
        if load.speed.knows_steps:
            step = load.speed.step_seconds(max(answers.num_begun, 1), context)
        took = load.speed.prefill_seconds(PROMPT_TOKENS, 0) if load.speed.is_known else 0.0
        used = cache.others + context + answers.coming + cache.unread
        detail = engine.state.detail
        error = detail if self.state in ("down", "suspected") and detail != "ok" else ""
        return {
            **{"name": engine.name, "role": engine.role, "url": engine.url, "state": self.state},
            **{"since": now - self.since, "in_flight": engine.work.in_flight},
            **{"computing": len(load.prompts.jobs), "waiting": len(load.queue)},
            **{"answers": answers.num_begun, "cache": used / cache.size if cache.size else None},
            "share": (seen[-1] - seen[0]) / max(len(seen) - 1, 1) / LOOK_SECONDS,
            "speed": PROMPT_TOKENS / took if took > 0.0 else None,
            **{"step": step, "error": error},
        }


def state_of(engine: Engine) -> str:
    if not engine.state.healthy:
        return "down"
    if engine.state.drains:
        return "draining"
    return "suspected" if engine.state.is_last else "ready"


class Window:
    """Holds nothing of a prompt or an answer, but ids, engines' names and times. *counted*: each of
    `COUNTED` so far."""

    def __init__(
        self,
        limits: Limits,
        engines: Callable[[], Iterable[Engine]],
        counted: Callable[[], Counter[str]],
    ) -> None:
        self._engines, self._counted = engines, counted
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
        engines, views = self._engines(), self._views
        self._views = {one: views.get(one) or EngineView(now) for one in engines}
        for engine, view in self._views.items():
            if view.look(engine, now):
                detail = f": {engine.state.detail}" if view.state == "down" else ""
                self._events.appendleft((now, engine.name, view.state + detail))
        totals = self._counted()
        self._history.count(totals - self._totals)
        self._totals = totals

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
            (name, engine, began - one.began, ended - one.began)
            for name, engine, began, ended in parts_of(one.began, marks)
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
