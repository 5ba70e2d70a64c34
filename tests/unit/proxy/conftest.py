"""Engines that answer as a vLLM server does, or misbehave on demand, and a proxy before them.

The engines are plain asyncio servers on loopback: a test sees the bytes that really arrived, and
decides to the byte what comes back."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from vllm_commext.drain import HEADER

BOUND_SECONDS = 60.0
asks_mark = {"tells_computed_by": True}
kv_params = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_block_ids": [[3, 1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "a_key_of_tomorrow": {"kept": [None, 1.5, "x"]},
}


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for *condition*, at most `BOUND_SECONDS`."""
    deadline = asyncio.get_running_loop().time() + BOUND_SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


@dataclass
class Call:
    """One request as an engine got it, and the connection to answer on."""

    path: str
    headers: dict[str, str]
    raw: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    complete: bool = False

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, status: int, content: bytes, kind: str = "application/json", headers: str = ""
    ) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}"
        self.complete = True
        await self.send(f"{head}\r\n{headers}\r\n".encode() + content)

    async def stream(
        self, pieces: Iterable[bytes], pause: Any = None, kind: str = "text/event-stream"
    ) -> None:
        """Answer by *pieces*, with a *pause* after each."""
        await self.begin_stream(kind)
        for piece in pieces:
            await self.chunk(piece)
            if pause is not None:
                await pause()
        await self.end_stream()

    async def begin_stream(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n"
        await self.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end_stream(self) -> None:
        self.complete = True
        await self.send(b"0\r\n\r\n")


Behaviour = Callable[[Call], Awaitable[None]]


async def prefill_ok(call: Call) -> None:
    answer = {"choices": [{"text": "!"}], "kv_transfer_params": kv_params}
    await call.answer(200, json.dumps(answer).encode())


async def both_ok(call: Call) -> None:
    params = call.body.get("kv_transfer_params") or {}
    await (prefill_ok if params.get("do_remote_decode") else decode_ok)(call)


ANSWERS: dict[str, Any] = {
    "/v1/messages": {"type": "message", "content": [{"type": "text", "text": "hello"}]},
    "/v1/messages/count_tokens": {"input_tokens": 3},
    "/v1/responses": {"object": "response", "output": []},
    "/v1/embeddings": {"data": [{"embedding": [0.5]}]},
    "/tokenize": {"tokens": [1], "count": 1},
    "/detokenize": {"prompt": "hello"},
}
"""Answers by path; all others have choices."""


async def decode_ok(call: Call) -> None:
    if not call.body.get("stream"):
        told = ANSWERS.get(call.path, {"choices": [{"text": "hello"}]})
        await call.answer(200, json.dumps(told).encode())
        return
    await streaming(b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")(call)


def held(release: asyncio.Event, then: Behaviour = decode_ok) -> Behaviour:

    async def behave(call: Call) -> None:
        await release.wait()
        await then(call)

    return behave


def answering(status: int, content: bytes) -> Behaviour:
    async def behave(call: Call) -> None:
        await call.answer(status, content)

    return behave


async def dropping(call: Call) -> None:
    """Read the request, then close without a byte."""


def streaming(*pieces: bytes, hangs: bool = False) -> Behaviour:
    """Answer with a stream of these pieces, which ends, or goes on without a word."""

    async def behave(call: Call) -> None:
        await call.begin_stream()
        for piece in pieces:
            await call.chunk(piece)
        await (hanging(call) if hangs else call.end_stream())

    return behave


def held_stream(release: asyncio.Event) -> Behaviour:
    """Begin a stream, and end it once it is let go."""

    async def behave(call: Call) -> None:
        await call.stream((b"data: 1\n\n", b"data: [DONE]\n\n"), release.wait)

    return behave


async def hanging(call: Call) -> None:
    """Read the request, then keep the connection and say nothing."""
    await asyncio.Event().wait()


async def _left(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)


@dataclass
class EngineServer:
    """One engine. `behave` answers what is posted; drains: it refuses that, as the engines' gate
    does; num_left: connections the proxy closed; streams, keys: its metrics say that it streams,
    and that it knows prefills by keys; channel: where its side channel is, under its HTTP port's
    number unless told; cache: tokens of its KV cache, and the share in use. `models` answers for
    the list of models."""

    behave: Behaviour
    models: Behaviour = answering(200, b'{"object": "list", "data": []}')
    health_status: int = 200
    drains: bool = False
    calls: list[Call] = field(default_factory=list)
    metrics_status: int = 200
    num_scrapes: int = 0
    streams: bool = False
    keys: bool = False
    channel: tuple[str, int, str] | None = None
    cache: tuple[int, float] | None = None
    num_left: int = 0
    num_refused: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def page(self) -> str:
        host, port, seal = self.channel or ("127.0.0.1", self.port, "ab")
        flags = f'streams="{self.streams:d}",reuse="1",releases="{self.keys:d}"'
        place = f'host="{host}",port="{port}",seal="{seal}"'
        told = f'vllm:commext_nixl_info{{model_name="tiny",engine="0",{place},{flags}}} 1.0\n'
        if self.cache is not None:
            size, use = self.cache
            told += f'vllm:cache_config_info{{engine="0",kv_cache_size_tokens="{size}"}} 1.0\n'
            told += f'vllm:kv_cache_usage_perc{{engine="0"}} {use}\n'
            told += f'vllm:iteration_tokens_total_count{{engine="0"}} {self.num_scrapes}\n'
        return told

    @asynccontextmanager
    async def running(self) -> AsyncIterator["EngineServer"]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on and cut those there are."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(await self._read(reader, writer)):
                pass
        except asyncio.IncompleteReadError as error:
            self.num_left += bool(error.partial)
        except ConnectionError:
            self.num_left += 1
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        pairs = (line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value for name, value in pairs}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        return Call(head[0].split()[1], headers, raw, reader, writer)

    async def _answer(self, call: Call) -> bool:
        """Whether the connection can carry another request."""
        if self.drains and call.path != "/v1/models":
            self.num_refused += call.path != "/health"
            await call.answer(503, b"", headers=f"{HEADER}: 1\r\n")
        elif call.path == "/health":
            await (call.answer(self.health_status, b"") if self.health_status else hanging(call))
        elif call.path == "/metrics":
            self.num_scrapes += 1
            await call.answer(self.metrics_status, self.page.encode())
        elif call.path == "/v1/models":
            await self.models(call)
        else:
            self.calls.append(call)
            await self._until_left(call)
        return call.complete

    async def _until_left(self, call: Call) -> None:
        """Behave, unless the proxy closes the connection first."""
        behaving = asyncio.ensure_future(self.behave(call))
        leaving = asyncio.ensure_future(_left(call.reader))
        try:
            await asyncio.wait((behaving, leaving), return_when=asyncio.FIRST_COMPLETED)
            if behaving.done():
                behaving.result()
            else:
                self.num_left += 1
        finally:
            for task in (behaving, leaving):
                task.cancel()
            await asyncio.gather(behaving, leaving, return_exceptions=True)


engine = EngineServer


@dataclass
class Cluster:
    """Engines, the proxy in front of them, and a client's session; stack: ends with them."""

    prefill: list[EngineServer]
    decode: list[EngineServer]
    proxy: Any
    session: Any
    url: str
    runner: Any
    both: list[EngineServer]
    stack: AsyncExitStack
    pools: Any

    def post(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> Any:
        """The client's request: an async context manager of the response."""
        return self.session.post(self.url + path, json=body, **kwargs)

    async def ask(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> Any:
        """The whole answer to a client's request, which ``read`` gives and ``json`` decodes."""
        async with self.post(body, path, **kwargs) as response:
            await response.read()
        return response

    async def answered(self, body: Any) -> tuple[int, str | None, str | None]:
        """A client's answer: its status, and the engines that had the prompt and the answer."""
        headers = (response := await self.ask(body)).headers
        return response.status, headers.get("X-Commext-Prefill"), headers.get("X-Commext-Decode")

    async def get(self, path: str, **kwargs: Any) -> Any:
        async with self.session.get(self.url + path, **kwargs) as response:
            await response.read()
        return response

    async def metrics(self) -> str:
        return await (await self.get("/metrics")).text()

    async def idle(self) -> None:
        """Nothing of any request may be left, however it ended."""
        engines = [engine for pool in self.pools for engine in pool.engines]
        await until(lambda: self.proxy.requests.num_in_flight == 0, "the proxy to be idle")
        await until(lambda: not any(one.work.in_flight for one in engines), "engines to be idle")


async def _proxy_before(stack: AsyncExitStack, urls: dict[str, list[str]], options: Any) -> Any:
    from vllm_commext.proxy.config import ProxyConfig
    from vllm_commext.proxy.routes_readiness_shutdown import ProxyApp, make_runner

    engines = {role: tuple(of_role) for role, of_role in urls.items()}
    config = ProxyConfig(**{"port": 0, **engines, **options})
    proxy = ProxyApp(config)
    runner = make_runner(proxy)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return proxy, runner


@asynccontextmanager
async def cluster(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    num_both: int = 0,
    keys: bool = False,
    channel: tuple[str, int, str] | None = None,
    **options: Any,
) -> AsyncIterator[Cluster]:
    """*keys*: prefill engines know them; *channel*: all engines stream, prefill engines there."""
    import aiohttp

    from vllm_commext.proxy.routes_readiness_shutdown import connections_of, open_port

    async with AsyncExitStack() as stack:
        servers = {
            "prefill": [
                EngineServer(prefill_ok, keys=keys, streams=channel is not None, channel=channel)
                for _ in range(num_prefill)
            ],
            "decode": [
                EngineServer(decode_ok, streams=channel is not None) for _ in range(num_decode)
            ],
            "both": [EngineServer(both_ok) for _ in range(num_both)],
        }
        for engine in (one for of_role in servers.values() for one in of_role):
            await stack.enter_async_context(engine.running())
        urls = {role: [engine.url for engine in engines] for role, engines in servers.items()}
        proxy, runner = await _proxy_before(stack, urls, options)
        port = await open_port(runner, connections_of(proxy.config), "127.0.0.1", 0)
        stack.callback(port.close)
        url = f"http://127.0.0.1:{port.sockets[0].getsockname()[1]}"
        timeout = aiohttp.ClientTimeout(total=BOUND_SECONDS)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        made = Cluster(
            *(servers["prefill"], servers["decode"], proxy, session, url, runner, servers["both"]),
            *(stack, proxy.registry.pools),
        )
        yield made
        await made.idle()


def outcome(kind: str, side: str) -> str:
    labels = f'endpoint="completions",outcome="{kind}",side="{side}"'
    return f"commext_proxy_requests_total{{{labels}}} 1.0"


async def expect_error(cluster: Cluster, status: int, kind: str, side: str) -> str:
    """Ask once; check every sign of the failure. The message."""
    async with cluster.post({"prompt": "hello", "max_tokens": 20}) as response:
        assert response.status == status
        assert response.headers["X-Commext-Side"] == side
        error = (await response.json())["error"]
    assert (error["type"], error["code"], error["side"]) == (kind, status, side)
    assert outcome(kind, side) in await cluster.metrics()
    return error["message"]


@pytest.fixture
def kit() -> ModuleType:
    """All of this file."""
    for library in ("aiohttp", "prometheus_client"):
        pytest.importorskip(library, reason=f"the extra [proxy] is not installed: no {library}")
    return sys.modules[__name__]
