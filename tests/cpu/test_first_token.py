"""The decode server writes the prefill server's first token, before it has the prompt's KV cache:
what a client is told is, to the byte but for times, what a plain server tells it, in the same
fields."""

import json
import random
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.event_streams import (
    CHAT,
    CHAT_TEMPLATE,
    COMPLETIONS,
    body_of,
    canonical,
    first_word,
    spoken,
    told,
)
from vllm_commext.testing import cluster
from vllm_commext.testing.metrics import scrape, wait_for_added
from vllm_commext.testing.servers import ProxyServer, Server, VllmServer

CHUNK_TOKENS = 128
FIRST_TOKENS = "vllm:commext_nixl_first_tokens_total"
# Without the connector. vLLM's own queue keeps a core busy for a second after each answer.
PLAIN_ENVIRON = {"VLLM_COMMEXT": "1", "VLLM_COMMEXT_NIXL": "0", **cluster.QUEUE_ENVIRON}
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
MARKUP = ("Ġ</", "</", "think", "<think>", "</think>", "<ifm|think>", "</ifm|think>")
"""Tokens that such parsers look for, in the place of control characters."""


@dataclass
class Servers:
    plain: Server
    prefill: VllmServer
    decode: VllmServer
    proxy: Server


def with_markup(model: Path, folder: Path) -> Path:
    """The same model with another tokenizer."""
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    places = {place: token for token, place in content["model"]["vocab"].items()}
    places.update(enumerate(MARKUP))
    content["model"]["vocab"] = {token: place for place, token in places.items()}
    file.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=PARSERS)
def servers(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("first")
    model = with_markup(model, folder / "model")
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    args = ["--chat-template", str(template), "--enable-auto-tool-choice"]
    args += ["--tool-call-parser", "hermes", "--reasoning-parser", request.param]
    chunk = ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
    plain = cluster.plain_server("plain", model, folder, args=args, environ=PLAIN_ENVIRON)
    prefill, decode = (
        cluster.engine_server(name, model, folder, cluster.kv_transfer_config(role), args=options)
        for name, role, options in (
            ("prefill", "kv_producer", args + chunk),
            ("decode", "kv_consumer", args),
        )
    )
    with cluster.all_ready([plain, prefill, decode]), ExitStack() as stack:
        proxy = stack.enter_context(
            ProxyServer(
                "proxy",
                prefill_urls=[prefill.url],
                decode_urls=[decode.url],
                folder=folder,
                args=[*cluster.PATIENT_PROXY_ARGS],
            )
        )
        told(proxy, COMPLETIONS, body_of(COMPLETIONS, {}))  # tells the proxy where to ask
        yield Servers(plain, prefill, decode, proxy)


def check(servers: Servers, path: str, body: Mapping[str, Any], way: str = "prefill") -> None:
    """A request is answered as by one server, with a first token that came in this way."""
    request_id = uuid.uuid4().hex
    before = scrape(servers.decode.url)
    found = told(servers.proxy, path, body, request_id)
    assert found.path == "streamed"
    assert canonical(found) == canonical(told(servers.plain, path, body, request_id))
    wait_for_added(servers.decode.url, before, FIRST_TOKENS, at_least=1)
    added = scrape(servers.decode.url).minus(before)
    assert added.total(FIRST_TOKENS, way=way) == added.total(FIRST_TOKENS) == 1


def test_each_answer_begins_with_its_own_word_in_one_servers_field(servers: Servers) -> None:
    words = ""
    for _ in range(3):
        body = spoken(servers.plain, CHAT, {}, but=words)
        words += first_word(servers.plain, CHAT, body)
        check(servers, CHAT, body)
    assert len(set(words)) == 3


KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "greedy": (COMPLETIONS, {}, "prefill"),
    "usage": (COMPLETIONS, USAGE, "prefill"),
    "continuous usage": (COMPLETIONS, CONTINUOUS, "prefill"),
    "token ids": (COMPLETIONS, {"return_token_ids": True}, "prefill"),
    "two tokens": (COMPLETIONS, {"max_tokens": 2, **USAGE}, "prefill"),
    "a stop token": (COMPLETIONS, {"stop_token_ids": list(range(256)), **USAGE}, "prefill"),
    "stop strings": (COMPLETIONS, {"stop": list("aeio"), "max_tokens": 40}, "prefill"),
    "echo": (COMPLETIONS, {"echo": True}, "prefill"),
    "log probabilities": (COMPLETIONS, {"logprobs": 1}, "logprobs"),
    "a seed": (COMPLETIONS, {"seed": 0, "temperature": 0.8}, "seeded"),
    "a penalty": (COMPLETIONS, {"presence_penalty": 0.5}, "penalties"),
    "a least length": (COMPLETIONS, {"min_tokens": 3}, "min_tokens"),
    "a grammar": (COMPLETIONS, {"structured_outputs": {"regex": "[a-c]{9}"}}, "grammar"),
    "a chat": (CHAT, {}, "prefill"),
    "a chat with usage": (CHAT, USAGE, "prefill"),
    "a chat with token ids": (CHAT, {"return_token_ids": True, **CONTINUOUS}, "prefill"),
    "a chat without reasoning": (CHAT, {"include_reasoning": False}, "prefill"),
    "a chat with tools": (CHAT, {"tools": TOOLS}, "prefill"),
    "a chat with a tool named": (
        CHAT,
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        "grammar",
    ),
    "log probabilities of a chat": (CHAT, {"logprobs": True}, "logprobs"),
    "a chat without a turn of its own": (
        CHAT,
        {"add_generation_prompt": False, "continue_final_message": True},
        "prefill",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_that_of_one_server(servers: Servers, kind: str) -> None:
    path, changes, way = KINDS[kind]
    check(servers, path, body_of(path, changes), way)


@pytest.mark.parametrize(
    "length",
    [1, 2, cluster.BLOCK_SIZE, cluster.BLOCK_SIZE + 1, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 5],
)
def test_a_prompt_of_any_length(servers: Servers, length: int) -> None:
    dice = random.Random(length)
    prompt = [dice.randrange(32, 127) for _ in range(length)]
    check(servers, COMPLETIONS, body_of(COMPLETIONS, {"prompt": prompt, **CONTINUOUS}))


def test_a_drawn_first_token_is_the_prefill_servers(servers: Servers) -> None:
    """Of an answer that is drawn no two are equal, but where all but one token is ruled out."""
    check(servers, COMPLETIONS, body_of(COMPLETIONS, {"temperature": 0.8, "top_k": 1}))
