"""Has prefill engines free at once what will not be read, by a completion of one token whose
parameters name the prefills' keys.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_commext.proxy.deadline import end_tasks
from vllm_commext.proxy.engines.pool import Engine
from vllm_commext.proxy.outcome import ProxyError

logger = logging.getLogger("vllm.commext.proxy")

KEY_BYTES = 16
MAX_KEYS = 256
GATHER_SECONDS = 0.02
"""Between two requests to one engine."""
CLOSE_SECONDS = 2.0
RANK = "X-data-parallel-rank"


class ReleaseTarget(NamedTuple):
    engine: Engine
    authorization: str | None
    model: str | None


@dataclass(frozen=True)
class Key:
    """Names a prefill; "" where its engine takes no keys."""

    target: ReleaseTarget
    value: str


def new_key(engine: Engine, headers: Mapping[str, str], body: Mapping[str, Any]) -> Key:
    model = body.get("model")
    target = ReleaseTarget(
        engine, headers.get("Authorization"), model if isinstance(model, str) else None
    )
    return Key(target, secrets.token_hex(KEY_BYTES) if engine.capabilities.key_ranks else "")


Post = Callable[[Engine, Mapping[str, str], Mapping[str, Any]], Awaitable[Any]]


class Releases:
    """*post* sends a completion, *note* counts keys by outcome."""

    def __init__(self, post: Post, note: Callable[[str, int], None]) -> None:
        self._post = post
        self._note = note
        self._waiting: dict[ReleaseTarget, list[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: Key) -> None:
        if not key.value:
            return
        if key.target in self._waiting:
            self._waiting[key.target].append(key.value)
        else:
            self._waiting[key.target] = [key.value]
            self._begin(self._send_all(key.target))

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        await end_tasks(self._tasks)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self, target: ReleaseTarget) -> None:
        """Send keys while there are any, without waiting for answers."""
        while keys := self._waiting[target]:
            self._waiting[target] = keys[MAX_KEYS:]
            ranks = target.engine.capabilities.key_ranks
            for rank in ranks:
                headers = {RANK: rank} if len(ranks) > 1 else {}
                self._begin(self._send(target, headers, keys[:MAX_KEYS]))
            await asyncio.sleep(GATHER_SECONDS)
        del self._waiting[target]

    async def _send(self, target: ReleaseTarget, headers: dict[str, str], keys: list[str]) -> None:
        headers["Content-Type"] = "application/json"
        if target.authorization is not None:
            headers["Authorization"] = target.authorization
        params = {"release": keys}
        body: dict[str, Any] = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        if target.model is not None:
            body["model"] = target.model
        try:
            await self._post(target.engine, headers, body)
        except ProxyError as error:
            self._note("failed", len(keys))
            text = "%s may keep %d prefills that nobody reads until their leases end: %s"
            logger.warning(text, target.engine.name, len(keys), error)
        else:
            self._note("sent", len(keys))
