"""Has prefill engines free at once what no decode engine will read."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter

from vllm_commext.drain import RELEASE
from vllm_commext.proxy.engines.engine import Engine

logger = logging.getLogger("vllm.commext.proxy")

MAX_KEYS = 256
GATHER_SECONDS = 0.02
"""Between two requests to one engine."""
CLOSE_SECONDS = 2.0
RANK = "X-data-parallel-rank"


class Key(NamedTuple):
    """Names a prefill to its engine; *value* is "" where that takes no keys."""

    engine: Engine
    authorization: str | None
    model: str | None
    value: str = ""


Post = Callable[[Engine, Mapping[str, str], Mapping[str, Any]], Awaitable[Exception | None]]


class Releases:
    """*post* sends a completion of one token whose parameters name the prefills' keys, and returns
    why it failed, or None. *counted* counts keys by outcome."""

    def __init__(self, post: Post, counted: Counter) -> None:
        self._post, self._counted = post, counted
        self._waiting: dict[Key, list[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: Key) -> None:
        target = key._replace(value="")
        if key.value and target in self._waiting:
            self._waiting[target].append(key.value)
        elif key.value:
            self._waiting[target] = [key.value]
            self._begin(self._send_all(target))

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self, target: Key) -> None:
        """Send keys while there are any, without waiting for answers."""
        while keys := self._waiting[target]:
            self._waiting[target] = keys[MAX_KEYS:]
            ranks = target.engine.capabilities.key_ranks
            for rank in ranks:
                headers = {RANK: rank} if len(ranks) > 1 else {}
                self._begin(self._send(target, headers, keys[:MAX_KEYS]))
            await asyncio.sleep(GATHER_SECONDS)
        del self._waiting[target]

    async def _send(self, target: Key, headers: dict[str, str], keys: list[str]) -> None:
        headers |= {"Content-Type": "application/json", RELEASE: "1"}
        if target.authorization is not None:
            headers["Authorization"] = target.authorization
        params = {"release": keys}
        body: dict[str, Any] = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        if target.model is not None:
            body["model"] = target.model
        error = await self._post(target.engine, headers, body)
        self._counted.labels("sent" if error is None else "failed").inc(len(keys))
        if error is not None:
            text = "%s may keep %d prefills that nobody reads until their leases end: %s"
            logger.warning(text, target.engine.name, len(keys), error)
