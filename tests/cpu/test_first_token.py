"""The decode server writes the prefill server's first token, before it has the prompt's KV cache:
what a client is told is, to the byte but for times, what a plain server tells it, in the same
fields."""

import json
import random
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.behind_proxy import Servers
from tests.cpu.event_streams import (
    CHAT,
    COMPLETIONS,
    FIRST_TOKENS,
    body_of,
    canonical,
    check_source,
    first_word,
    rounded,
    spoken,
    tokens_and_first,
    told,
)
from tests.kit import cluster, parity
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.prompts import CHAT_TEMPLATE
from tests.kit.servers import ProxyServer, Server

CHUNK_TOKENS = 128
HANDOVERS = "vllm:commext_nixl_handovers_total"
FAILURES = "vllm:commext_nixl_failures_total"
ATOL = 1e-4  # nats, at float32
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
PARSERS = ("olmo3", pytest.param("k2_horizon", marks=pytest.mark.long))
"""These name the one token of an unstreamed answer's otherwise than the first one of a stream."""
NAMES = ("id", "created", "system_fingerprint", "kv_transfer_params")
"""Of an answer, what is a server's own."""
MARKUP = ("Ġ</", "</", "think", "<think>", "</think>", "<ifm|think>", "</ifm|think>")
"""Tokens that such parsers look for, in the place of control characters."""


def with_markup(model: Path, folder: Path, unspoken: str = "") -> Path:
    """The same model with another tokenizer, where one token is beyond those that it may say."""
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    places = {place: token for token, place in content["model"]["vocab"].items()}
    places.update(enumerate(one for one in MARKUP if one != unspoken))
    places.update({len(places): unspoken} if unspoken else {})
    content["model"]["vocab"] = {token: place for place, token in places.items()}
    file.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=PARSERS)
def servers(
    request: pytest.FixtureRequest, deep_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("first")
    model = with_markup(deep_model, folder / "model")
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    args = ["--chat-template", str(template), "--enable-auto-tool-choice"]
    args += ["--tool-call-parser", "hermes", "--reasoning-parser", request.param]
    chunk = ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
    plain = cluster.plain_server("plain", model, folder, args=args, environ=cluster.PLAIN_ENVIRON)
    prefill, decode = (
        cluster.engine_server(name, model, folder, cluster.kv_transfer_config(role), args=options)
        for name, role, options in (
            ("prefill", "kv_producer", args + chunk),
            ("decode", "kv_consumer", args),
        )
    )
    urls = [prefill.url], [decode.url]
    proxy = ProxyServer("proxy", *urls, folder, args=cluster.PATIENT_PROXY_ARGS)
    with cluster.all_ready([plain, prefill, decode]), proxy:
        yield Servers(plain, prefill, decode, proxy)


def check(servers: Servers, path: str, body: Mapping[str, Any], way: str = "prefill") -> None:
    """A request is answered as by one server, with a first token that came in this way; a token
    that comes later than the prompt, as it may on a busy machine, is the decode server's own."""
    request_id = uuid.uuid4().hex
    before = scrape(servers.decode.url)
    found = told(servers.proxy, path, body, request_id)
    assert found.path == "streamed"
    look = canonical if path == COMPLETIONS else tokens_and_first
    assert look(found) == look(told(servers.plain, path, body, request_id))
    wait_for_added(servers.decode.url, before, FIRST_TOKENS, at_least=1)
    added = scrape(servers.decode.url).minus(before)
    check_source(added, way)


def test_each_answer_begins_with_its_own_word_in_one_servers_field(servers: Servers) -> None:
    words = ""
    for _ in range(3):
        body = spoken(servers.plain, CHAT, {}, but=words)
        words += first_word(servers.plain, CHAT, body)
        check(servers, CHAT, body)
    assert len(set(words)) == 3


KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "greedy": (COMPLETIONS, {}, "prefill"),
    "continuous usage": (COMPLETIONS, CONTINUOUS, "prefill"),
    "stop strings": (COMPLETIONS, {"stop": list("aeio"), "max_tokens": 40}, "prefill"),
    "log probabilities": (COMPLETIONS, {"logprobs": 1}, "parameters"),
    "a seed": (COMPLETIONS, {"seed": 0, "temperature": 0.8}, "parameters"),
    "a grammar": (COMPLETIONS, {"structured_outputs": {"regex": "[a-c]{9}"}}, "parameters"),
    "a chat with usage": (CHAT, USAGE, "prefill"),
    "a chat with token ids": (CHAT, {"return_token_ids": True, **CONTINUOUS}, "prefill"),
    "a chat with tools": (CHAT, {"tools": TOOLS}, "prefill"),
    "a chat without a turn of its own": (
        CHAT,
        {"add_generation_prompt": False, "continue_final_message": True},
        "prefill",
    ),
}
"""Of each other kind a token is told or computed here as tests/contract has it, without servers."""
ONE_TOKEN = {
    "one token": (COMPLETIONS, {"max_tokens": 1}, "prefill"),
    "a chat of one token": (CHAT, {"max_tokens": 1}, "prefill"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_that_of_one_server(servers: Servers, kind: str) -> None:
    path, changes, way = KINDS[kind]
    check(servers, path, body_of(path, changes), way)


@pytest.mark.parametrize("kind", [*ONE_TOKEN, *KINDS])
def test_an_answer_in_one_piece_is_that_of_one_server(servers: Servers, kind: str) -> None:
    path, changes, way = {**KINDS, **ONE_TOKEN}[kind]
    body = {**body_of(path, changes), "stream": False}
    body.pop("stream_options", None)
    before = scrape(servers.decode.url)
    got, own = (
        rounded(parity.post(f"{server.url}{path}", body).text)
        for server in (servers.proxy, servers.plain)
    )
    assert {name: got[name] for name in got if name not in NAMES} == {
        name: own[name] for name in own if name not in NAMES
    }
    wait_for_added(servers.decode.url, before, FIRST_TOKENS, at_least=1)
    check_source(scrape(servers.decode.url).minus(before), way)


def test_a_drawn_first_token_is_the_prefill_servers(servers: Servers) -> None:
    """Of an answer that is drawn no two are equal, but where all but one token is ruled out."""
    check(servers, COMPLETIONS, body_of(COMPLETIONS, {"temperature": 0.8, "top_k": 1}))


def test_log_probabilities_are_one_servers(servers: Servers) -> None:
    """Of prompts of several chunks, and not those of a prompt that differs a little."""

    def ask(server: Server, prompt: Sequence[int]) -> parity.Completion:
        return parity.complete(server.url, cluster.MODEL_NAME, prompt)

    dice = random.Random(29)
    before = scrape(servers.decode.url)
    for num_tokens in (5 * CHUNK_TOKENS, 5 * CHUNK_TOKENS + 77, CHUNK_TOKENS + 1):
        prompt = [dice.randrange(32, 127) for _ in range(num_tokens)]
        right, found = ask(servers.plain, prompt), ask(servers.proxy, prompt)
        assert parity.compare(right, found, ATOL).position is None
        altered = ask(servers.proxy, [33, *prompt[1:-1], 33])
        altered = replace(altered, prompt=right.prompt)
        assert parity.compare(right, altered, ATOL).position is not None
    wait_for_added(servers.decode.url, before, HANDOVERS, at_least=6)
    added = scrape(servers.decode.url).minus(before)
    assert added.total(HANDOVERS, way="streamed") == 6
    assert added.total("vllm:commext_nixl_failures_total") == 0
