"""The proxy sends the prefill server's first token before the decode server has answered: what a
client is told is, to the byte but for times, what it is told without that, and what a plain server
tells it.  So it is where the decode server reads a prompt while it is computed."""

import json
import random
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.event_streams import (
    CHAT,
    CHAT_TEMPLATE,
    COMPLETIONS,
    EARLY,
    Told,
    asked,
    body_of,
    canonical,
    spoken,
    told,
)
from vllm_commext.testing import cluster, parity
from vllm_commext.testing.metrics import scrape, wait_for_added
from vllm_commext.testing.servers import ProxyServer, Server, VllmServer

CHUNK_TOKENS = 128
NUM_STREAMED = 8
HANDOVERS = "vllm:commext_nixl_handovers_total"
FIRST_TOKENS = "vllm:commext_nixl_first_tokens_total"
ATOL = 1e-4  # nats, at float32
WAYS = "commext_proxy_first_tokens_total"
# Without the connector. vLLM's own queue keeps a core busy for a second after each answer.
PLAIN_ENVIRON = {"VLLM_COMMEXT": "1", "VLLM_COMMEXT_NIXL": "0", **cluster.QUEUE_ENVIRON}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}


@dataclass
class Servers:
    plain: Server
    prefill: VllmServer
    decode: VllmServer
    early: Server
    late: Server
    streamed: Server


@contextmanager
def engines(model: Path, folder: Path) -> Iterator[list[VllmServer]]:
    """A plain server, a prefill and a decode server."""
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    # With a parser of tool calls, as many servers have one, a chat's text goes through it.
    args = ["--chat-template", str(template), "--enable-auto-tool-choice"]
    args += ["--tool-call-parser", "hermes"]
    servers = [cluster.plain_server("plain", model, folder, args=args, environ=PLAIN_ENVIRON)]
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = cluster.kv_transfer_config(role)
        chunk = ["--max-num-batched-tokens", str(CHUNK_TOKENS)] if name == "prefill" else []
        servers.append(cluster.engine_server(name, model, folder, config, args=args + chunk))
    with cluster.all_ready(servers):
        yield servers


@contextmanager
def proxy(name: str, prefill: Server, decode: Server, folder: Path, *args: str) -> Iterator[Server]:
    with ProxyServer(
        name,
        prefill_urls=[prefill.url],
        decode_urls=[decode.url],
        folder=folder,
        args=[*cluster.PATIENT_PROXY_ARGS, *args],
    ) as server:
        yield server


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("early")
    with engines(model, folder) as (plain, prefill, decode), ExitStack() as stack:
        whole = ("--stream-chunks", "never")
        early, late, streamed = (
            stack.enter_context(proxy(name, prefill, decode, folder, *args))
            for name, args in (
                ("early", (*whole, "--early-first-token")),
                ("late", whole),
                ("streamed", ("--stream-chunks", "always")),
            )
        )
        yield Servers(plain, prefill, decode, early, late, streamed)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {}),
    "usage": (COMPLETIONS, USAGE),
    "continuous usage": (COMPLETIONS, CONTINUOUS),
    "token ids": (COMPLETIONS, {"return_token_ids": True}),
    "two tokens": (COMPLETIONS, {"max_tokens": 2, **USAGE}),
    "defaults spelt out": (COMPLETIONS, {"n": 1, "presence_penalty": 0, "stop": [], "echo": False}),
    "a chat": (CHAT, {}),
    "a chat with usage": (CHAT, USAGE),
    "a chat with continuous usage": (CHAT, CONTINUOUS),
    "a chat with token ids": (CHAT, {"return_token_ids": True, **CONTINUOUS}),
    "a chat without a turn of its own": (
        CHAT,
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}
NOT_EARLY: dict[str, tuple[str, dict[str, Any], str]] = {
    "one token": (COMPLETIONS, {"max_tokens": 1}, "one_token"),
    "a chat of one token": (CHAT, {"max_completion_tokens": 1}, "one_token"),
    "a stop token": (COMPLETIONS, {"stop_token_ids": list(range(256))}, "ends"),
    "a stop string": (COMPLETIONS, {"stop": ["e"]}, "request"),
    "echo": (COMPLETIONS, {"echo": True}, "request"),
    "log probabilities": (COMPLETIONS, {"logprobs": 1}, "request"),
    "log probabilities of a chat": (CHAT, {"logprobs": True}, "request"),
    "a seed": (COMPLETIONS, {"seed": 0, "temperature": 0.8}, "request"),
    "a penalty": (CHAT, {"presence_penalty": 0.5}, "request"),
    "a grammar": (COMPLETIONS, {"structured_outputs": {"regex": "[a-c]{9}"}}, "request"),
    "several samples": (COMPLETIONS, {"n": 2, "temperature": 0.8}, "request"),
}


def ask_everywhere(servers: Servers, path: str, body: Mapping[str, Any]) -> Sequence[Told]:
    request_id = uuid.uuid4().hex
    order = (servers.early, servers.late, servers.plain)
    return [told(server, path, body, request_id) for server in order]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_begins_early_is_that_of_one_server(servers: Servers, kind: str) -> None:
    path, changes = KINDS[kind]
    for is_known in (False, True):  # a stream of this kind shows what they look like
        early, late, plain = ask_everywhere(servers, path, spoken(servers.plain, path, changes))
        assert early.is_early or not is_known
        assert not late.is_early
        assert canonical(early) == canonical(late) == canonical(plain)


@pytest.mark.parametrize("kind", NOT_EARLY)
def test_what_asks_for_more_waits_for_the_decode_server(servers: Servers, kind: str) -> None:
    path, changes, way = NOT_EARLY[kind]
    for _ in range(2):
        before = num_requests(servers.early, way)
        early, late, plain = ask_everywhere(servers, path, body_of(path, changes))
        assert not early.is_early
        if "n" not in changes:
            texts = [canonical(stream)["text"] for stream in (early, late, plain)]
            assert texts[0] == texts[1] == texts[2]
        assert num_requests(servers.early, way) == before + 1


def test_a_prompt_is_read_while_it_is_computed(servers: Servers) -> None:
    def ask(server: Server, prompt: Sequence[int]) -> parity.Completion:
        return parity.complete(server.url, cluster.MODEL_NAME, prompt)

    dice = random.Random(29)
    ask(servers.streamed, [dice.randrange(32, 127) for _ in range(20)])  # tells the proxy where
    before = scrape(servers.streamed.url), scrape(servers.decode.url)
    for num_tokens in (5 * CHUNK_TOKENS, 5 * CHUNK_TOKENS + 77, CHUNK_TOKENS + 1):
        prompt = [dice.randrange(32, 127) for _ in range(num_tokens)]
        right, found = ask(servers.plain, prompt), ask(servers.streamed, prompt)
        assert parity.compare(right, found, ATOL).position is None
        altered = ask(servers.streamed, [33, *prompt[1:-1], 33])
        altered = replace(altered, prompt=right.prompt)
        assert parity.compare(right, altered, ATOL).position is not None
    added = scrape(servers.streamed.url).minus(before[0])
    assert added.total("commext_proxy_streams_total", way="streamed") == 6
    wait_for_added(servers.decode.url, before[1], HANDOVERS, at_least=6)
    added = scrape(servers.decode.url).minus(before[1])
    assert added.total(HANDOVERS, way="streamed") == 6
    assert added.total("vllm:commext_nixl_failures_total") == 0


def test_a_prompt_that_is_read_while_it_is_computed_goes_on_from_its_first_token(
    servers: Servers,
) -> None:
    """Without log probabilities, which D computes itself: tokens and usage of one server, the first
    token from P whenever it has come before the prompt."""
    dice = random.Random(31)
    before = scrape(servers.decode.url)
    for number in range(NUM_STREAMED):
        prompt = [dice.randrange(32, 127) for _ in range(4 * CHUNK_TOKENS + number)]
        kind = {"prompt": prompt, "return_token_ids": True, **CONTINUOUS}
        body, request_id = body_of(COMPLETIONS, kind), uuid.uuid4().hex
        found = told(servers.streamed, COMPLETIONS, body, request_id)
        assert canonical(found) == canonical(told(servers.plain, COMPLETIONS, body, request_id))
    wait_for_added(servers.decode.url, before, FIRST_TOKENS, at_least=NUM_STREAMED)
    added = scrape(servers.decode.url).minus(before)
    assert added.total(HANDOVERS, way="streamed") >= NUM_STREAMED - 1  # the first tells where
    ways = {way: added.total(FIRST_TOKENS, way=way) for way in ("prefill", "not_offered")}
    assert sum(ways.values()) == NUM_STREAMED
    assert ways["prefill"] > NUM_STREAMED / 2


def test_a_decode_server_that_is_killed_after_the_first_token(
    servers: Servers, model: Path, tmp_path: Path
) -> None:
    mortal = cluster.engine_server(
        "mortal", model, tmp_path, cluster.kv_transfer_config("kv_consumer")
    )
    with mortal, proxy("before-mortal", servers.prefill, mortal, tmp_path) as early:
        told(early, COMPLETIONS, spoken(servers.plain, COMPLETIONS, {}), uuid.uuid4().hex)
        body, request_id = spoken(servers.plain, COMPLETIONS, {}), uuid.uuid4().hex
        whole = told(servers.plain, COMPLETIONS, body, request_id)
        mortal.signal_all(signal.SIGSTOP)
        with asked(early, COMPLETIONS, body, request_id) as answer:
            pieces = answer.iter_raw()
            first = next(pieces)
            mortal.signal_all(signal.SIGKILL)
            rest = b"".join(pieces)
        assert EARLY in answer.headers
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == text_of(whole)[0]
        error = json.loads(rest.removeprefix(b"data: "))["error"]
        assert error["side"] == "decode"


def text_of(stream: Told) -> str:
    return str(canonical(stream)["text"])


def num_requests(server: Server, way: str) -> int:
    return int(scrape(server.url).total(WAYS, way=way))
