"""Every kind of request between real servers is answered, or refused, as by one: through our proxy,
through a plain router that passes everything on, and as known routers send it; with parameters that
are mixed up or altered. A prefill that will not be read is kept by no engine, whatever was refused
and whichever client has left.

A plain server without this package is the reference. The decode server recomputes what it cannot
load, so that every answer can be compared: one that came from another prompt's KV would differ."""

import asyncio
import json
import random
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.cpu.behind_proxy import NIXL, SECRET, Servers, new_prompt, new_text, serving
from tests.cpu.router_requests import ROUTERS, text_of
from tests.kit import cluster
from tests.kit.crossed import crossed
from tests.kit.metrics import scrape
from tests.kit.parity import PREFILL_PARAMS, compare, post, tls
from tests.kit.servers import Server
from vllm_commext.nixl.wire.params import read_params, write_params

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOG_SECONDS = 30
NUM_LEAVING = 100
ATOL = 1e-4  # nats, at float32
BLOCKS = f"{NIXL}blocks_total"
FAILURES = f"{NIXL}failures_total"


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with serving(model, tmp_path_factory.mktemp("parameters")) as started:
        yield started


def worded(path: str, changes: Mapping[str, Any], num_words: int = 20) -> dict[str, Any]:
    """A request with a prompt of its own."""
    text = f"{secrets.token_hex(4)} " * num_words
    body: dict[str, Any] = {"model": cluster.MODEL_NAME, "max_tokens": 4, "temperature": 0.0}
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {**body, **prompt, **changes}


def answers(servers: Servers, method: str, path: str, **content: Any) -> list[httpx.Response]:
    """One server's and the proxy's, whatever their status."""
    return [
        httpx.request(
            method, server.url + path, timeout=60, trust_env=False, verify=tls(), **content
        )
        for server in (servers.plain, servers.proxy)
    ]


TOO_MANY = 100 * cluster.MAX_MODEL_LEN
REFUSED: dict[str, dict[str, Any]] = {
    # What a vLLM server refuses, as changes to a body that it serves.
    "below one": {"max_tokens": -1},
    "beyond the context": {"max_tokens": TOO_MANY},
    "no number": {"max_tokens": "many"},
    "a fraction": {"max_tokens": 1.5},
    "a list": {"max_tokens": [3]},
    "beyond 64 bits": {"max_tokens": 1 << 70},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "options of another type": {"stream_options": 3, "stream": True},
    "stop tokens of another type": {"stop_token_ids": ["x"]},
    "no list of stop tokens": {"stop_token_ids": "x"},
    "more at least than at most": {"min_tokens": 9},
    "at least a negative number": {"min_tokens": -2},
    "at least a word": {"min_tokens": "few"},
    "samples of another type": {"n": "x"},
    "no sample": {"n": 0},
    "a penalty out of range": {"presence_penalty": 9},
    "a flag of another type": {"ignore_eos": "perhaps"},
    "another model": {"model": "nobody's"},
    "no flag whether to stream": {"stream": "perhaps"},
}
CHAT_REFUSED: dict[str, dict[str, Any]] = {
    "the newer name, below one": {"max_completion_tokens": -1},
    "the newer name, no number": {"max_completion_tokens": "many"},
    "the newer name, beyond the context": {"max_completion_tokens": TOO_MANY},
}
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
        body = worded(path, asked)
        one, other = answers(servers, "POST", path, json=body)
        assert (other.status_code, other.json()) == (one.status_code, one.json())
        assert one.status_code >= 400
    servers.frees_all()


async def status_of(client: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> int:
    async with client.post(path, json=body) as answer:
        await answer.read()
        return answer.status


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
        body = worded(path, {"stream": numbers.random() < 0.5, "max_tokens": 8}, num_words)
        asking = asyncio.create_task(status_of(client, path, body))
        done, _ = await asyncio.wait([asking], timeout=numbers.random() * 1.5)
        asking.cancel()
        await asyncio.wait([asking])
        return bool(done)

    async def leave_all() -> int:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(servers.proxy.url, connector=connector) as client:
            return sum(await asyncio.gather(*(leave(client) for _ in range(NUM_LEAVING))))

    num_answered = asyncio.run(leave_all())
    servers.frees_all()
    moved = scrape(servers.prefill.url).minus(before)
    assert moved.total(f"{NIXL}expired_requests_total") == 0
    assert num_answered < NUM_LEAVING


MESSAGE = {"model": cluster.MODEL_NAME, "messages": [{"role": "user", "content": "hello there"}]}
DOORS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "version": ("GET", "/version", None),
    "messages": ("POST", "/v1/messages", {**MESSAGE, "max_tokens": 4, "temperature": 0}),
    "messages in vain": ("POST", "/v1/messages", MESSAGE),
    "count": ("POST", "/v1/messages/count_tokens", MESSAGE),
    "responses": (
        "POST",
        "/v1/responses",
        {"model": cluster.MODEL_NAME, "input": "hello", "max_output_tokens": 4, "temperature": 0},
    ),
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
CHANGING = {
    *("id", "created", "created_at", "completed_at", "request_id", "kv_transfer_params"),
    "system_fingerprint",
}


def told_of(content: Any) -> Any:
    """An answer but for names and times of its own."""
    if isinstance(content, dict):
        return {name: told_of(one) for name, one in content.items() if name not in CHANGING}
    return [told_of(one) for one in content] if isinstance(content, list) else content


@pytest.mark.parametrize("name", DOORS)
def test_what_else_a_server_answers_is_answered_as_it_does(servers: Servers, name: str) -> None:
    method, path, body = DOORS[name]
    one, other = answers(servers, method, path, json=body)
    assert other.status_code == one.status_code
    assert told_of(other.json()) == told_of(one.json())
    asked = {"Origin": "https://page", "Access-Control-Request-Method": method}
    one, other = answers(servers, "OPTIONS", path, headers=asked)
    assert (other.status_code, other.text) == (one.status_code, one.text)
    for header in ("allow-origin", "allow-methods"):
        name = f"access-control-{header}"
        assert other.headers.get(name) == one.headers.get(name)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("num_words", [20, 80], ids=["one chunk", "several chunks"])
def test_cached_tokens_are_those_of_one_server(servers: Servers, path: str, num_words: int) -> None:
    """P's, though D is asked before P can have told it of them."""
    for changes in ({"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}):
        body = worded(path, changes, num_words)
        for _ in range(2):
            one, other = answers(servers, "POST", path, json=body)
            assert usage_in(other) == usage_in(one)
            assert other.headers["X-Commext-Path"] == "streamed"
        assert usage_in(one)["prompt_tokens_details"]["cached_tokens"] > 0


def usage_in(answer: httpx.Response) -> dict[str, Any]:
    """The last usage of an answer."""
    events = answer.text.split("\n\n") if "[DONE]" in answer.text else [answer.text]
    told = [json.loads(one.removeprefix("data: ")) for one in events if '"usage"' in one]
    return next(one["usage"] for one in reversed(told) if one["usage"])


def test_swapped_parameters_answer_from_nobodys_cache_but_their_own(servers: Servers) -> None:
    one, two = new_prompt(), new_prompt()
    expected = {prompt: servers.reference(prompt) for prompt in (one, two)}
    params = {prompt: servers.prefilled(prompt) for prompt in (one, two)}
    before, start = scrape(servers.decode.url), len(servers.decode.log_text())
    got = servers.decoded(one, params[two])
    assert compare(expected[one], got, ATOL).equal, "answered from another prompt's KV cache"
    line = servers.decode.wait_for_log("KV cache not loaded", LOG_SECONDS, start)
    assert "those of another prompt" in line
    assert "token ids" in line
    added = servers.added(before, FAILURES, at_least=1)
    assert added.total(FAILURES, reason="request") == added.total(FAILURES) == 1
    assert added.total(BLOCKS) == 0
    again = servers.decoded(one, None)
    assert compare(expected[one], again, ATOL).equal, "another prompt's KV cache was kept for it"
    # The mistake took nothing from the request whose parameters they are.
    before = scrape(servers.decode.url)
    assert compare(expected[two], servers.decoded(two, params[two]), ATOL).equal
    assert servers.added(before, BLOCKS, at_least=4).total(BLOCKS) == 4


# What a request may ask for that a router or the connector has to mind: path, body, and the blocks
# that the decode server reads of it through the proxy and through the plain router (None: any).
COLOURS = {"type": "string", "enum": ["red", "green", "blue"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint it.",
        "parameters": {
            "type": "object",
            "properties": {"colour": COLOURS},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
CHATS = {"logprobs": True, "top_logprobs": 5}
SAMPLES = {"n": 2, "temperature": 0.8, "seed": 5}
KINDS: dict[str, tuple[str, dict[str, Any], int, int | None]] = {
    "one prompt": (COMPLETIONS, {}, 4, 4),
    "several samples": (COMPLETIONS, SAMPLES, 0, None),
    "several prompts": (COMPLETIONS, {"prompt": 2}, 0, 4),
    "echo": (COMPLETIONS, {"echo": True, "logprobs": None}, 4, 4),
    "echo with logprobs": (COMPLETIONS, {"echo": True}, 0, 0),
    "prompt logprobs": (COMPLETIONS, {"prompt_logprobs": 2}, 0, 0),
    "a choice": (COMPLETIONS, {"structured_outputs": {"choice": ["red", "green"]}}, 4, 4),
    "a pattern": (COMPLETIONS, {"structured_outputs": {"regex": "[a-c]{9}"}}, 4, 4),
    "a chat": (CHAT, CHATS, 4, 4),
    "a chat with a schema": (
        CHAT,
        {
            **CHATS,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "colour", "schema": COLOURS},
            },
        },
        4,
        4,
    ),
    "a tool call": (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "paint"}}},
        -1,
        None,
    ),
    "tools to choose from": (CHAT, {**CHATS, "tools": [TOOL], "tool_choice": "auto"}, -1, None),
}


def body_of(path: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A request with a prompt that no server has seen, of four blocks and a little."""
    body: dict[str, Any] = {
        "model": cluster.MODEL_NAME,
        "max_tokens": 16,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    if path == COMPLETIONS:
        body |= {"prompt": new_prompt(), "logprobs": 5}
    else:
        body["messages"] = [
            {"role": "system", "content": new_text(30)},
            {"role": "user", "content": new_text(60)},
        ]
    body |= changes
    if isinstance(body.get("prompt"), int):
        body["prompt"] = [new_prompt() for _ in range(body["prompt"])]
    return body


def ask(server: Server, path: str, body: Mapping[str, Any]) -> Any:
    return post(f"{server.url}{path}", body).json()


def ask_by_plain_router(servers: Servers, path: str, body: Mapping[str, Any]) -> Any:
    """Two steps that change nothing but what the first one must not generate."""
    first = {**body, "max_tokens": 1, "kv_transfer_params": dict(PREFILL_PARAMS)}
    params = ask(servers.prefill, path, first)["kv_transfer_params"]
    return ask(servers.decode, path, {**body, "kv_transfer_params": params})


def assert_same(expected: Any, got: Any, place: str = "choices") -> None:
    """Equal, numbers with a fraction within ``ATOL``; names that are drawn at random aside."""
    if isinstance(expected, dict):
        assert isinstance(got, dict), place
        for name in (expected.keys() | got.keys()) - {"id"}:
            assert_same(expected.get(name), got.get(name), f"{place}.{name}")
    elif isinstance(expected, list):
        assert isinstance(got, list), place
        assert len(expected) == len(got), f"{place}: {expected} {got}"
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert_same(one, other, f"{place}[{number}]")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, abs=ATOL), place
    else:
        assert got == expected, place


# By the plain router only one kind of each number of blocks goes with `make test`.
BY_BOTH = ("one prompt", "several prompts", "echo with logprobs", "a chat", "a tool call")
ASKED = [
    *((kind, "proxy") for kind in KINDS),
    *(
        pytest.param(kind, "plain", marks=[] if kind in BY_BOTH else pytest.mark.long)
        for kind in KINDS
    ),
]


@pytest.mark.parametrize(("kind", "router"), ASKED)
def test_every_kind_of_request_is_answered_as_by_one_server(
    servers: Servers, kind: str, router: str
) -> None:
    path, changes, *blocks = KINDS[kind]
    body = body_of(path, changes)
    before = scrape(servers.decode.url)
    if router == "proxy":
        got = ask(servers.proxy, path, body)
    else:
        got = ask_by_plain_router(servers, path, body)
    expected = ask(servers.plain, path, body)
    assert_same(expected["choices"], got["choices"])
    num_blocks = blocks[router == "plain"]
    if num_blocks is not None:
        at_least = abs(num_blocks)
        read = servers.added(before, BLOCKS, at_least=at_least).total(BLOCKS)
        assert read >= at_least if num_blocks < 0 else read == num_blocks, json.dumps(body)


def test_another_first_token_is_another_answer(servers: Servers) -> None:
    """The control of ``test_first_token.py``: the token is used, and a wrong one shows."""
    body = body_of(COMPLETIONS, {"logprobs": None})
    expected = ask(servers.plain, COMPLETIONS, body)["choices"][0]["token_ids"]
    secret = SECRET["COMMEXT_NIXL_SECRET"].encode()
    handle = read_params(servers.prefilled(body["prompt"]), secret)
    assert handle.first_token == expected[0]
    wrong = replace(handle, first_token=(expected[0] + 1) % 256)
    params = write_params(wrong, secret)
    got = ask(servers.decode, COMPLETIONS, {**body, "kv_transfer_params": params})
    assert got["choices"][0]["token_ids"][0] == wrong.first_token
    # Nothing of it stays: the prompt's own cache answers the same request right.
    again = ask(servers.decode, COMPLETIONS, body)
    assert again["choices"][0]["token_ids"] == expected
    altered = {**params, "remote_first_token": expected[0]}
    start = len(servers.decode.log_text())
    assert ask(servers.decode, COMPLETIONS, {**body, "kv_transfer_params": altered})
    assert "or altered" in servers.decode.wait_for_log("KV cache not loaded", LOG_SECONDS, start)


ROUTED = {
    "a completion": (COMPLETIONS, {"min_tokens": 1}),
    "a streamed chat": (
        CHAT,
        {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 16},
    ),
}


@pytest.mark.parametrize(("name", "kind"), crossed(list(ROUTERS), list(ROUTED)))
def test_the_requests_of_known_routers_are_answered_with_the_cache_of_the_prefill_server(
    servers: Servers, name: str, kind: str
) -> None:
    path, changes = ROUTED[kind]
    body = body_of(path, changes)
    before = scrape(servers.decode.url)
    got = ROUTERS[name](servers.prefill.url, servers.decode.url, path, body)
    plain = {**body, "stream": False}
    plain.pop("stream_options", None)
    expected = ask(servers.plain, path, plain)["choices"]
    assert text_of(got) == text_of(expected) != ""
    assert servers.added(before, BLOCKS, at_least=4).total(BLOCKS) == 4
