"""What a client asks for that an engine refuses is refused as one vLLM server refuses it, and a
prefill that nobody will read is kept by no engine: whatever was refused, whoever has left when."""

import asyncio
import json
import random
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.kit import cluster
from tests.kit.crossed import crossed
from tests.kit.metrics import scrape
from tests.kit.parity import complete, tls
from tests.kit.refused_bodies import CHAT_REFUSED, REFUSED
from tests.kit.servers import ProxyServer, Server, VllmServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
NIXL = "vllm:commext_nixl_"
FREE_SECONDS = 30.0
"""Half a lease: what is free by then has been released."""
NUM_LEAVING = 200


@dataclass
class Servers:
    plain: Server
    prefill: VllmServer
    decode: VllmServer
    proxy: Server

    def held(self) -> float:
        return scrape(self.prefill.url).total(f"{NIXL}held_requests")

    def frees_all(self) -> None:
        """P holds nothing, before and not because leases end."""
        deadline = time.monotonic() + FREE_SECONDS
        while (held := self.held()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert held == 0, f"{held:g} prefills are held {FREE_SECONDS} s later"
        assert scrape(self.prefill.url).total(f"{NIXL}expired_requests_total") == 0


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("unread")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    args = ["--chat-template", str(template), "--enable-prompt-tokens-details"]
    plain = cluster.plain_server("plain", model, folder, args=args, environ=cluster.PLAIN_ENVIRON)
    engines: list[VllmServer] = []
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        chunk = ["--max-num-batched-tokens", "128"] if name == "prefill" else []
        config = cluster.kv_transfer_config(role)
        engines.append(cluster.engine_server(name, model, folder, config, args=[*args, *chunk]))
    with (
        cluster.all_ready([plain, *engines]),
        ProxyServer(
            "proxy", [engines[0].url], [engines[1].url], folder, args=cluster.PATIENT_PROXY_ARGS
        ) as proxy,
    ):
        yield Servers(plain, *engines, proxy)


def body_of(path: str, changes: Mapping[str, Any], num_words: int = 20) -> dict[str, Any]:
    """A request with a prompt of its own."""
    text = f"{secrets.token_hex(4)} " * num_words
    body: dict[str, Any] = {"model": cluster.MODEL_NAME, "max_tokens": 4, "temperature": 0.0}
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {**body, **prompt, **changes}


def sent(method: str, url: str, **content: Any) -> httpx.Response:
    """The answer, whatever its status."""
    return httpx.request(method, url, timeout=60, trust_env=False, verify=tls(), **content)


ONE_BY_ONE = crossed((COMPLETIONS, CHAT), list(REFUSED))
ONE_BY_ONE += [(CHAT, name) for name in CHAT_REFUSED]


@pytest.mark.parametrize(
    ("path", "name"), ONE_BY_ONE, ids=lambda value: str(value).rpartition("/")[2]
)
def test_a_refusal_is_that_of_one_server_and_nothing_is_held(
    servers: Servers, path: str, name: str
) -> None:
    changes = {**REFUSED, **CHAT_REFUSED}[name]
    streams = [changes] if "options" in name or "stream" in changes else []
    for asked in streams or [changes, {**changes, "stream": True}]:
        body = body_of(path, asked)
        one, other = (
            sent("POST", server.url + path, json=body) for server in (servers.plain, servers.proxy)
        )
        assert (other.status_code, other.json()) == (one.status_code, one.json())
        assert one.status_code >= 400
    servers.frees_all()


EVERY = [(path, name) for path in (COMPLETIONS, CHAT) for name in REFUSED]


async def status_of(client: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> int:
    async with client.post(path, json=body) as answer:
        await answer.read()
        return answer.status


def test_four_of_each_refused_kind_at_once_leave_nothing(servers: Servers) -> None:
    """Of a client that asks as soon as it is connected: the proxy waits for that 10 s, in which one
    that takes long for each request, on a busy machine, has connections closed that it is about to
    use."""

    async def ask_all() -> list[int]:
        bodies = [(path, body_of(path, REFUSED[name])) for path, name in EVERY * 4]
        async with aiohttp.ClientSession(servers.proxy.url) as client:
            return await asyncio.gather(*(status_of(client, *one) for one in bodies))

    statuses = asyncio.run(ask_all())
    servers.frees_all()
    assert all(400 <= status < 500 for status in statuses)


@pytest.mark.parametrize(
    "num_words",
    [
        pytest.param(20, id="one chunk", marks=pytest.mark.long),
        pytest.param(80, id="several chunks"),
    ],
)
def test_clients_that_leave_at_any_moment_leave_nothing(servers: Servers, num_words: int) -> None:
    numbers = random.Random(num_words)
    before = scrape(servers.prefill.url)

    async def leave(client: aiohttp.ClientSession) -> bool:
        await asyncio.sleep(numbers.random())
        path = numbers.choice((COMPLETIONS, CHAT))
        body = body_of(path, {"stream": numbers.random() < 0.5, "max_tokens": 8}, num_words)
        asking = asyncio.create_task(status_of(client, path, body))
        done, _ = await asyncio.wait([asking], timeout=numbers.random() * 1.5)
        asking.cancel()
        await asyncio.wait([asking])
        return bool(done)

    async def leave_all() -> int:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(servers.proxy.url, connector=connector) as client:
            return sum(await asyncio.gather(*(leave(client) for _ in range(NUM_LEAVING // 2))))

    num_answered = asyncio.run(leave_all())
    servers.frees_all()
    moved = scrape(servers.prefill.url).minus(before)
    assert moved.total(f"{NIXL}expired_requests_total") == 0
    assert num_answered < NUM_LEAVING // 2


@pytest.mark.parametrize("release", ["x", 7, {}, [[[]]], [{"a": 1}], [1.5], True, ["0" * 9999]])
def test_a_release_that_is_none_is_harmless(servers: Servers, release: Any) -> None:
    own = {"kv_transfer_params": {"release": release}}
    assert complete(servers.prefill.url, cluster.MODEL_NAME, [1, 2, 3], extra=own).token_ids


MESSAGE = {"model": cluster.MODEL_NAME, "messages": [{"role": "user", "content": "hello there"}]}
DOORS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "version": ("GET", "/version", None),
    "messages": ("POST", "/v1/messages", {**MESSAGE, "max_tokens": 4, "temperature": 0}),
    "messages in vain": ("POST", "/v1/messages", MESSAGE),
    "count": ("POST", "/v1/messages/count_tokens", MESSAGE),
    "batch": (
        "POST",
        "/v1/chat/completions/batch",
        {**MESSAGE, "messages": [MESSAGE["messages"]] * 2, "max_tokens": 4, "temperature": 0},
    ),
    "generate": (
        "POST",
        "/inference/v1/generate",
        {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "temperature": 0}},
    ),
    "ids": (
        "POST",
        COMPLETIONS,
        {
            "model": cluster.MODEL_NAME,
            "prompt": "rendered elsewhere",
            "max_tokens": 4,
            "temperature": 0,
            "kv_transfer_params": {"prompt_token_ids": [11, 12, 13, 14, 15]},
        },
    ),
    "ids that are none": (
        "POST",
        CHAT,
        {**MESSAGE, "max_tokens": 4, "kv_transfer_params": {"prompt_token_ids": [-1, "x"]}},
    ),
}
CHANGING = ("id", "created", "request_id", "kv_transfer_params", "system_fingerprint")


def told(answer: httpx.Response) -> tuple[int, Any]:
    content = answer.json()
    return answer.status_code, {k: v for k, v in content.items() if k not in CHANGING}


@pytest.mark.parametrize("name", DOORS)
def test_what_else_a_server_answers_is_answered_as_it_does(servers: Servers, name: str) -> None:
    method, path, body = DOORS[name]
    one, other = (
        sent(method, server.url + path, json=body) for server in (servers.plain, servers.proxy)
    )
    assert told(other) == told(one)
    asked = {"Origin": "https://page", "Access-Control-Request-Method": method}
    one, other = (
        sent("OPTIONS", server.url + path, headers=asked)
        for server in (servers.plain, servers.proxy)
    )
    assert (other.status_code, other.text) == (one.status_code, one.text)
    for header in ("allow-origin", "allow-methods"):
        name = f"access-control-{header}"
        assert other.headers.get(name) == one.headers.get(name)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("num_words", [20, 80], ids=["one chunk", "several chunks"])
def test_cached_tokens_are_those_of_one_server(servers: Servers, path: str, num_words: int) -> None:
    """P's, though D is asked before P can have told it of them."""
    for changes in ({"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}):
        body = body_of(path, changes, num_words)
        for _ in range(2):
            one, other = (
                sent("POST", server.url + path, json=body)
                for server in (servers.plain, servers.proxy)
            )
            assert cached_in(other) == cached_in(one)
            assert other.headers["X-Commext-Path"] == "streamed"
        assert cached_in(one) > 0


def cached_in(answer: httpx.Response) -> int:
    """The cached tokens that an answer's last usage tells of."""
    events = answer.text.split("\n\n") if "[DONE]" in answer.text else [answer.text]
    told = [json.loads(one.removeprefix("data: ")) for one in events if '"usage"' in one]
    usage = next(one["usage"] for one in reversed(told) if one["usage"])
    return usage["prompt_tokens_details"]["cached_tokens"]
