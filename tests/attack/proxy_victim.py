"""The real proxy as a process, before two local engines that answer at once."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tests.attack.judge import Victim, soft_limit
from tests.kit.ports import LOOPBACK, free_port
from tests.kit.servers import UNVERIFIED, ProxyServer, Server
from tests.unit.proxy.conftest import Call, EngineServer, decode_ok, hanging, prefill_ok

BOUND_SECONDS = 30.0
HONEST = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 3}).encode()
_OWN_DESCRIPTORS, _KEPT = 40, {"keep_alive_seconds": 2.0}
"""Connections to engines are kept for up to twice as long, which is less than judges wait."""
_GIVEN_UP = b'{"choices": [{"text": "w", "finish_reason": "abort"}]}'
_PAGE = b'vllm:other{engine="0"} 1.0\n' * 2000
_EVENTS = b'data: {"choices": [{"text": "w"}]}\n\n' * 500
SECONDS_A_BYTE = 0.25e-6
NUM_TOKENS = 4  # of a stream that is cut after half of them


class EndlessPage(EngineServer):
    """Its metrics page has no end."""

    async def _answer(self, call: Call) -> bool:
        if call.path != "/metrics":
            return await super()._answer(call)
        await call.begin_stream()
        while True:
            await call.chunk(_PAGE)


async def flood(call: Call) -> None:
    """A stream without end as fast as it is taken, where a stream is asked for."""
    if not call.body.get("stream"):
        await decode_ok(call)
        return
    await call.begin_stream()
    while True:
        await call.chunk(_EVENTS)


@dataclass
class ProxyVictim:
    """One proxy, and the engines before which it stands."""

    proxy: ProxyServer
    engines: Sequence[Server]
    connect: ClassVar[Callable[..., http.client.HTTPConnection]] = http.client.HTTPConnection

    @property
    def port(self) -> int:
        return self.proxy.port

    @property
    def pids(self) -> Sequence[int]:
        return self.proxy.pids()

    @property
    def serving(self) -> Sequence[int]:
        return [*self.pids, *(pid for engine in self.engines for pid in engine.pids())]

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """An answer of status 200, on a connection of its own."""
        connection = type(self).connect(LOOPBACK, self.port, timeout=BOUND_SECONDS)
        with closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        if answer.status != 200:
            raise ValueError(f"expected 200, got {answer.status} {content[:200]!r}")
        return content

    def honest(self) -> None:
        """A request in two steps."""
        content = self.ask("POST", "/v1/completions", HONEST)
        if json.loads(content)["choices"][0]["text"] != "hello":
            raise ValueError(f"expected hello, got {content[:200]!r}")

    def held(self) -> Mapping[str, float]:
        """Descriptors; a few connections to engines come and go."""
        numbers = [len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids]
        return {"descriptors": float(max(sum(numbers) - _OWN_DESCRIPTORS, 0))}


class StreamVictim(ProxyVictim):
    """Others' streams are cut once, and go on at another engine."""

    def honest(self) -> None:
        told = self.ask("POST", "/v1/completions", b'{"prompt": "cut", "stream": true}')
        if told.count(b'"w"') != NUM_TOKENS or b"[DONE]" not in told:
            raise ValueError(f"expected a stream that goes on, got {told[-200:]!r}")


class LiveVictim(ProxyVictim):
    """A proxy that others ask whether it lives: its requests may have to wait for theirs."""

    def honest(self) -> None:
        self.ask("GET", "/live")


class TlsVictim(ProxyVictim):
    """A proxy that speaks TLS alone."""

    connect = partial(http.client.HTTPSConnection, context=UNVERIFIED)


@contextmanager
def proxy(
    folder: Path,
    *options: str,
    decode: Sequence[str] = ("decode",),
    prefill: str = "prefill",
    kind: type[ProxyVictim] = ProxyVictim,
) -> Iterator[ProxyVictim]:
    """A proxy with *options*, at the usual soft limit of descriptors."""
    with ExitStack() as stack:
        engines = [stack.enter_context(_engine(folder, name)) for name in (prefill, *decode)]
        first, *others = [engine.url for engine in engines]
        server = ProxyServer("proxy", [first], others, folder, args=options, values=_KEPT)
        with soft_limit():
            stack.enter_context(server)
        yield kind(server, engines)


def before(*options: str, **more: Any) -> Callable[[Path], AbstractContextManager[ProxyVictim]]:
    return lambda folder: proxy(folder, *options, **more)


def connected(victim: Victim, host: str = LOOPBACK) -> socket.socket:
    """A connection of an attacker at *host*."""
    assert isinstance(victim, ProxyVictim)
    return socket.create_connection((LOOPBACK, victim.port), 10, source_address=(host, 0))


def head(length: int, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *headers, "", ""]).encode()


def posted(content: Any, path: str = "/v1/completions") -> bytes:
    """A request with *content*, JSON if it is not bytes."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return head(len(body), path=path) + body


def _engine(folder: Path, behaviour: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", __name__, behaviour, str(port)]
    return Server(behaviour, command, folder, port=port)


async def moody(call: Call) -> None:
    """Give up some requests, and fail others, as their prompts say."""
    told = {"abort": (200, _GIVEN_UP), "fail": (500, b'{"error": {"message": "a bug"}}')}
    status, content = told.get(call.body["prompt"], (0, b""))
    await (call.answer(status, content) if status else decode_ok(call))


_turn, _cut = asyncio.Lock(), asyncio.Event()


async def computing(call: Call) -> None:
    """Compute one prompt after the other, in a time by its bytes."""
    async with _turn:
        await asyncio.sleep(SECONDS_A_BYTE * len(call.raw))
    await prefill_ok(call)


async def cutting(call: Call) -> None:
    """Cut streams in their midst: some at once, some all together when told so."""
    prompt = call.body["prompt"]
    if prompt == "cut all":
        _cut.set()
    if not call.body.get("stream"):
        await decode_ok(call)
        return
    goes_on = "answer_token_ids" in call.body.get("kv_transfer_params", {})
    await call.begin_stream()
    for token in range(NUM_TOKENS if goes_on else NUM_TOKENS // 2):
        end = "stop" if token == NUM_TOKENS - 1 else None
        choice = {"index": 0, "text": "w", "token_ids": [token], "finish_reason": end}
        await call.chunk(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    if goes_on:
        await call.chunk(b"data: [DONE]\n\n")
        await call.end_stream()
    elif prompt != "cut":
        await _cut.wait()


_BEHAVIOURS = {"prefill": prefill_ok, "flood": flood, "moody": moody}
_BEHAVIOURS |= {"computing": computing, "cutting": cutting}


async def _serve(behaviour: str, port: int) -> None:
    kind = EndlessPage if behaviour == "endless-page" else EngineServer
    engine = kind(_BEHAVIOURS.get(behaviour, decode_ok), port=port)
    if behaviour == "silent-models":
        engine.models = hanging
    async with engine.running():
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
