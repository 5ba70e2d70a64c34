"""Requests through a real proxy, prefill and decode server, of which a third is refused, given up
by its client, or never sent whole: the others are answered, and the prefill server keeps nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit import cluster
from tests.kit.metrics import Metrics, scrape
from tests.kit.refused_bodies import CHAT_REFUSED, REFUSED
from tests.kit.servers import LOOPBACK, ProxyServer
from tests.kit.tiny_model import write_tiny_model

NAME = "refused"
NUM_AT_A_TIME = 32
FREE_SECONDS = 2.0
BOUND_SECONDS = 60.0
LEAVE_SECONDS = 0.3
NIXL = "vllm:commext_nixl_"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass
class Load:
    """What is asked of one proxy, and what came of it.

    done: how many of each kind have ended; wrong: what was answered otherwise than it should be;
    seconds: that good requests took.
    """

    port: int
    numbers: random.Random
    done: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    seconds: list[float] = field(default_factory=list[float])

    async def run(self, num_requests: int) -> None:
        """Send them in random order, a third of them bad in equal parts."""
        bad = (self._refused, self._given_up, self._half_sent)
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            bad[number // 3 % 3] if number % 3 == 0 else self._good
            for number in range(num_requests)
        ]
        self.numbers.shuffle(kinds)
        left = iter(kinds)
        await asyncio.gather(*(self._some(left) for _ in range(NUM_AT_A_TIME)))

    async def _some(self, left: Any) -> None:
        for ask in left:
            name = ask.__name__[1:]
            try:
                await asyncio.wait_for(ask(), BOUND_SECONDS)
            except (OSError, ValueError, LookupError, TimeoutError) as error:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
            self.done[name] += 1

    async def _good(self) -> None:
        body = self._body(COMPLETIONS, ignore_eos=True, max_tokens=self.numbers.choice((1, 2)))
        began = time.monotonic()
        status, content = await self._answer(COMPLETIONS, body)
        self.seconds.append(time.monotonic() - began)
        most = body["max_tokens"]
        if status != 200 or json.loads(content)["usage"]["completion_tokens"] != most:
            raise ValueError(f"expected {most} tokens, got {status} {content[:200]!r}")

    async def _refused(self) -> None:
        path = self.numbers.choice((COMPLETIONS, CHAT))
        kinds = {**REFUSED, **(CHAT_REFUSED if path == CHAT else {})}
        name = self.numbers.choice(list(kinds))
        status, content = await self._answer(path, self._body(path, **kinds[name]))
        if not 400 <= status < 500:
            raise ValueError(f"{name}: expected a refusal, got {status} {content[:200]!r}")

    async def _given_up(self) -> None:
        """Whole, and the client leaves at any moment."""
        path = self.numbers.choice((COMPLETIONS, CHAT))
        body = self._body(path, max_tokens=8, stream=self.numbers.random() < 0.5)
        data = _request(path, body)
        await self._leave(data, self.numbers.random() * LEAVE_SECONDS)

    async def _half_sent(self) -> None:
        data = _request(COMPLETIONS, self._body(COMPLETIONS))
        part = data[: self.numbers.randrange(1, len(data))]
        await self._leave(part, self.numbers.random() * LEAVE_SECONDS)

    async def _leave(self, data: bytes, seconds: float) -> None:
        _, writer = await asyncio.open_connection(LOOPBACK, self.port)
        writer.write(data)
        await asyncio.sleep(seconds)
        writer.transport.abort()

    async def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(LOOPBACK, self.port)
        try:
            writer.write(_request(path, body))
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if b"chunked" in head.lower():
            content = _joined(content)
        return int(head.split()[1]), content

    def _body(self, path: str, **changes: Any) -> dict[str, Any]:
        """A request with a prompt of its own, of less and of more than one block."""
        text = f"{self.numbers.getrandbits(32):x} " * self.numbers.choice((2, 12))
        prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {}
        body: dict[str, Any] = {"model": cluster.MODEL_NAME, "max_tokens": 2, "temperature": 0}
        return {**body, **(prompt or {"prompt": text}), **changes}


def _request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json")
    end = (f"Content-Length: {len(content)}", "Connection: close", "", "")
    return "\r\n".join((*lines, *end)).encode() + content


def _joined(chunks: bytes) -> bytes:
    """A body that came in chunks. Raises `ValueError` where its end is missing."""
    content, rest = b"", chunks
    while True:
        size, _, rest = rest.partition(b"\r\n")
        number = int(size, 16)
        if not number:
            return content
        content, rest = content + rest[:number], rest[number + 2 :]


def refused(folder: Path, num_requests: int) -> tuple[str, list[str]]:
    """Run it; what came, in a line, and what of it is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    model = write_tiny_model(folder / "model")
    engines = [
        cluster.engine_server(
            *(name, model, folder, cluster.kv_transfer_config(role)),
            args=["--chat-template", str(template)],
        )
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    prefill, decode = ([engine.url] for engine in engines)
    patient = cluster.PATIENT_PROXY_ARGS
    server = ProxyServer("proxy", prefill, decode, folder, args=patient)
    with cluster.all_ready(engines), server as proxy:
        load = Load(proxy.port, random.Random(1))
        began = time.monotonic()
        asyncio.run(load.run(num_requests))
        took = time.monotonic() - began
        free_seconds, page = _until_free(engines[0].url)
        return _told(load, took, free_seconds, page)


def _until_free(url: str) -> tuple[float, Metrics]:
    """Seconds until a prefill server holds nothing, at most `FREE_SECONDS`, and its metrics."""
    began = time.monotonic()
    while True:
        page = scrape(url)
        waited = time.monotonic() - began
        if not _held(page) or waited >= FREE_SECONDS:
            return waited, page
        time.sleep(0.05)


def _held(page: Metrics) -> dict[str, float]:
    names = (f"{NIXL}held_requests", "vllm:kv_cache_usage_perc", "vllm:num_requests_running")
    return {name: page.total(name) for name in names if page.total(name)}


def _told(load: Load, took: float, free_seconds: float, page: Metrics) -> tuple[str, list[str]]:
    counts = ", ".join(f"{number} {name}" for name, number in sorted(load.done.items()))
    counters = ("released_requests", "expired_requests")
    kept = ", ".join(f"{page.total(f'{NIXL}{one}_total'):g} {one}" for one in counters)
    median = sorted(load.seconds)[len(load.seconds) // 2] if load.seconds else 0.0
    line = (
        f"{NAME}: {load.done.total()} requests in {took:.0f} s ({counts}); good ones took "
        f"{median * 1e3:.0f} ms in the median, {max(load.seconds, default=0.0) * 1e3:.0f} ms at "
        f"most; the prefill server held nothing {free_seconds:.1f} s after the last ({kept})"
    )
    problems = [f"{len(load.wrong)} wrong, {load.wrong[0]}"] if load.wrong else []
    if held := _held(page):
        problems.append(f"{FREE_SECONDS:g} s after the last request the prefill server has {held}")
    if expired := page.total(f"{NIXL}expired_requests_total"):
        problems.append(f"{expired:g} prefills were kept until their leases ended")
    return line, problems
