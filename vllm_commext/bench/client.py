"""Open-loop client: each request goes out at its time, however many are outstanding; times are read
off the events of its streamed answer in one pass."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from vllm_commext.bench.figures import Sample
from vllm_commext.bench.workload import Arrival
from vllm_commext.errors import CommextError

_CHOICES = re.compile(rb'"choices":\s*\[\s*\{')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_FIELD = b"data:"
_DONE = b"[DONE]"


class Events:
    """Events of one answer, as its bytes come.

    first, last: instants of the first and the last event with a part of the answer; gap: the
    longest time between two of them; num_tokens: what the server counts, or events with a part
    where it does not; error: what it told of, or empty; done: whether it has ended the stream.
    """

    def __init__(self) -> None:
        self.first = self.last = self.gap = 0.0
        self.error, self.done = "", False
        self._num_events = self._counted = 0
        self._held = b""

    @property
    def num_tokens(self) -> int:
        return self._counted or self._num_events

    def feed(self, data: bytes, now: float) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        num_events = self._num_events
        for line in lines:
            if line.startswith(_FIELD):
                self._take(line)
        if self._num_events == num_events:
            return
        if num_events:
            self.gap = max(self.gap, now - self.last)
        else:
            self.first = now
        self.last = now

    def _take(self, line: bytes) -> None:
        if b'"completion_tokens"' in line and (found := _COMPLETION.search(line)):
            self._counted = int(found[1])
        if _CHOICES.search(line):
            self._num_events += 1
        elif b'"error"' in line:
            self.error = self.error or _message(line[len(_FIELD) :])
        elif line[len(_FIELD) :].strip() == _DONE:
            self.done = True


def _message(text: bytes) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError, RecursionError):
        return text.decode(errors="replace").strip()


CONNECT_SECONDS = 10.0
QUESTION_SECONDS = 10.0
CANCEL_SECONDS = 5.0
PROGRESS_SECONDS = 2.0
# Below the five seconds after which vLLM closes an idle connection, perhaps just as we use it.
KEEP_ALIVE_SECONDS = 2.0
ERROR_CHARACTERS = 200
DEFAULT_VOCAB = 10_000
PLACEMENT_HEADER, ENGINE_HEADER = "X-Commext-Placement", "X-Commext-Decode"
_LEAD_SECONDS = 0.05


class EndpointError(CommextError, RuntimeError):
    """An endpoint that does not answer as a server of completions does."""


@dataclass(frozen=True)
class Endpoint:
    """A server of ``/v1/completions``: its URL, its model, how many tokens that knows, and how many
    a request may have; 0: it does not say."""

    url: str
    model: str
    vocab_size: int
    max_tokens: int = 0
    api_key: str = ""


@dataclass(frozen=True)
class Played:
    """A sample of each request, and by how many seconds the client itself was late at most."""

    samples: list[Sample]
    late: float


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def find(url: str, *, vocab_size: int = 0, api_key: str = "") -> Endpoint:
    """The endpoint's first model.  Its vocabulary is as given, or as the model's configuration
    says where it lies on this machine, or else `DEFAULT_VOCAB`, which is in most of them."""
    url = url.rstrip("/")
    timeout = aiohttp.ClientTimeout(total=QUESTION_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=_headers(api_key)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            response.raise_for_status()
            card = (await response.json(content_type=None))["data"][0]
            model, max_tokens = str(card["id"]), int(card.get("max_model_len") or 0)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise EndpointError(
            f"{url}/v1/models: expected a list of models within {QUESTION_SECONDS:g} s, got "
            f"{_told(error)}"
        ) from error
    return Endpoint(url, model, vocab_size or _vocab_size(card), max_tokens, api_key)


def _vocab_size(card: dict[str, Any]) -> int:
    with suppress(OSError, ValueError, TypeError, LookupError):
        content = json.loads((Path(card["root"]) / "config.json").read_text())
        return int(content["vocab_size"])
    return DEFAULT_VOCAB


async def play(
    endpoint: Endpoint,
    arrivals: Sequence[Arrival],
    bodies: Sequence[bytes],
    *,
    wait_seconds: float,
    progress: Callable[[str], None] | None = None,
) -> Played:
    """Send every body at its arrival's time; wait so long for answers after the last one.

    Answers that have not ended by then, or that have another number of tokens than asked for, are
    failures.
    """
    load = _Load(endpoint, arrivals, bodies, wait_seconds)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=_headers(endpoint.api_key)
    ) as session:
        watch = asyncio.create_task(load.watch(progress)) if progress else None
        try:
            return await load.run(session)
        finally:
            if watch is not None:
                watch.cancel()


class _Load:
    def __init__(
        self,
        endpoint: Endpoint,
        arrivals: Sequence[Arrival],
        bodies: Sequence[bytes],
        wait_seconds: float,
    ) -> None:
        self._url = f"{endpoint.url}/v1/completions"
        self._arrivals = arrivals
        self._bodies = bodies
        self._wait_seconds = wait_seconds
        self._begin = time.perf_counter() + _LEAD_SECONDS
        self._ended: dict[int, Sample] = {}
        self._num_sent = 0
        self._late = 0.0

    async def run(self, session: aiohttp.ClientSession) -> Played:
        tasks: list[asyncio.Task[None]] = []
        for place, arrival in enumerate(self._arrivals):
            left = self._begin + arrival.at - time.perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.create_task(self._request(session, place)))
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=self._wait_seconds)
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending, timeout=CANCEL_SECONDS)
        late = f"not ended within {self._wait_seconds:g} s of the last request's time"
        samples = [
            self._ended.get(place) or replace(self._blank(place), error=late)
            for place in range(len(self._arrivals))
        ]
        return Played(samples, self._late)

    async def watch(self, progress: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            num_failed = sum(bool(one.error) for one in self._ended.values())
            progress(
                f"{time.perf_counter() - self._begin:.0f} s: {self._num_sent} of "
                f"{len(self._arrivals)} sent, {len(self._ended)} ended, {num_failed} failed"
            )

    def _blank(self, place: int) -> Sample:
        one = self._arrivals[place]
        return Sample(one.at, one.prompt_tokens, one.output_tokens)

    async def _request(self, session: aiohttp.ClientSession, place: int) -> None:
        due = self._begin + self._arrivals[place].at
        self._late = max(self._late, time.perf_counter() - due)
        self._num_sent += 1
        events, sample = Events(), self._blank(place)
        try:
            headers, body = {"Content-Type": "application/json"}, self._bodies[place]
            async with session.post(self._url, data=body, headers=headers) as response:
                placement = response.headers.get(PLACEMENT_HEADER, "")
                engine = response.headers.get(ENGINE_HEADER, "")[:ERROR_CHARACTERS]
                sample = replace(sample, placement=placement[:ERROR_CHARACTERS], engine=engine)
                error = await _read(response, events)
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            error = _told(failure)
        if not error and events.num_tokens != sample.output_tokens:
            error = f"expected {sample.output_tokens} tokens, got {events.num_tokens}"
        if events.first:
            sample = replace(
                sample, first=events.first - due, last=events.last - due, gap=events.gap
            )
        self._ended[place] = replace(sample, error=error)


async def _read(response: aiohttp.ClientResponse, events: Events) -> str:
    """Read an answer; return why it failed, or nothing."""
    if response.status != 200:
        text = (await response.text(errors="replace"))[:ERROR_CHARACTERS]
        return f"HTTP {response.status}: {' '.join(text.split())}"
    async for data in response.content.iter_any():
        events.feed(data, time.perf_counter())
    return events.error[:ERROR_CHARACTERS] or ("" if events.done else "ended before [DONE]")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
