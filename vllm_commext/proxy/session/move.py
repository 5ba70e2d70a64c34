"""Whether a stream leaves a decode engine that drains, and the watch for that.

Where decode engines offer blocks to one another, the new one reads what the old one has of the
stream; else a prefill engine computes the prompt first. Then the stream stops at the end of an
event. The old engine is let go when the new one has repeated what the client has; until then the
stream can go on where it was.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_commext.proxy.deadline import end_tasks
from vllm_commext.proxy.engines.pool import Engine
from vllm_commext.proxy.session.resume import Resume
from vllm_commext.proxy.session.transcript import Transcript

MIN_LEFT = 16
"""An answer with fewer tokens left is not moved."""


def reason_to_stay(most_tokens: int, transcript: Transcript) -> Resume | None:
    if (reason := transcript.settle()) is not None:
        return reason
    num_left = most_tokens - transcript.num_tokens
    return Resume.ENDING if transcript.has_finished or num_left < MIN_LEFT else None


def has_other(engine: Engine, engines: Iterable[Engine]) -> bool:
    return any(one.usable and one is not engine for one in engines)


def read_from(engine: Engine, engines: Iterable[Engine], body: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of *body* for an engine that reads the answer so far at *engine*; none unless every
    usable one of *engines* can."""
    known, others = engine.capabilities, [one.capabilities for one in engines if one.usable]
    if not (known.caches and known.offers and all(one.caches and one.offers for one in others)):
        return {}
    params = body.get("kv_transfer_params") or {}
    return {"kv_transfer_params": {**params, "reuse_from": list(known.offers)}}


@dataclass(eq=False)
class Leaving:
    """Begins *work* once *engine* drains, and once only. has_gone_on: what was stopped goes on."""

    engine: Engine
    work: Callable[["Leaving"], Coroutine[Any, Any, None]]
    has_gone_on: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        self.engine.on_drain.add(self._begin)
        if self.engine.is_emptied:
            self._begin()

    def forget(self) -> None:
        self.engine.on_drain.discard(self._begin)

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done() and not self.has_gone_on.is_set()

    async def end(self) -> None:
        self.forget()
        if self._task is not None:
            await end_tasks([self._task])

    def _begin(self) -> None:
        self.forget()
        self._task = asyncio.create_task(self.work(self))
