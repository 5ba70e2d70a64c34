"""A decode server that is killed in mid-stream: its answers go on at another one, and clients are
told, but for times, what a plain server tells them."""

import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cpu.event_streams import (
    CHAT,
    CHAT_TEMPLATE,
    COMPLETIONS,
    Told,
    asked,
    body_of,
    canonical,
    tokens_and_first,
    told,
)
from tests.cpu.first_tokens import FIRST_TOKENS
from tests.cpu.test_first_token import PLAIN_ENVIRON, TOOLS, with_markup
from tests.kit import cluster
from tests.kit.fleet import Routing
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.servers import Server, VllmServer
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_model import write_tiny_model

NUM_TOKENS, NUM_FIRST = 400, 5
BOUND_SECONDS = 300.0
RESUMES = "commext_proxy_resumes_total"
NOTE = b',"commext_resumed":1'
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}
SERVED = (
    "llama",
    pytest.param("granite1", marks=pytest.mark.long),
    pytest.param("qwen3next", marks=pytest.mark.long),
)
# What is asked for, and whether the other server goes on from the tokens or begins again.
ASKED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "usage": (COMPLETIONS, USAGE, True),
    "continuous usage": (COMPLETIONS, CONTINUOUS, True),
    "token ids": (COMPLETIONS, {"return_token_ids": True, **USAGE}, True),
    "a stop string that does not come": (COMPLETIONS, {"stop": ["no such string"]}, True),
    "a seed": (COMPLETIONS, {"seed": 0, "temperature": 0.8, **USAGE}, False),
    "log probabilities": (COMPLETIONS, {"logprobs": 1, **USAGE}, False),
    "log probabilities of a chat": (CHAT, {"logprobs": True, **USAGE}, False),
    "a penalty": (COMPLETIONS, {"presence_penalty": 0.5, **USAGE}, False),
    "a chat": (CHAT, USAGE, True),
    "a chat with token ids": (CHAT, {"return_token_ids": True, **CONTINUOUS}, True),
    "a chat with tools": (CHAT, {"tools": TOOLS, **USAGE}, True),
}


@dataclass
class Servers:
    plain: Server
    prefill: VllmServer
    first: VllmServer
    second: VllmServer
    routing: Routing


@pytest.fixture(scope="module", params=SERVED)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = with_markup(write_tiny_model(folder / kind, kind), folder / "model")
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    args = [*KINDS[kind].cpu_options, "--chat-template", str(template)]
    args += [] if kind == "llama" else ["--no-enable-prefix-caching"]
    args += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args += ["--reasoning-parser", "olmo3"]
    plain = cluster.plain_server("plain", model, folder, args=args, environ=PLAIN_ENVIRON)
    roles = {"prefill": "kv_producer", "first": "kv_consumer", "second": "kv_consumer"}
    made = {
        name: cluster.engine_server(
            name, model, folder, cluster.kv_transfer_config(role), args=args
        )
        for name, role in roles.items()
    }
    routing = Routing(folder, made)
    routing.assign(prefill="prefill", first="decode")
    with cluster.all_ready([plain, *made.values()]), routing.proxy:
        yield Servers(plain, **made, routing=routing)


class Asked:
    """A stream that is read by a thread of its own, and stays where it is after its first events
    until it is let go."""

    def __init__(self, servers: Servers, name: str, barrier: threading.Barrier) -> None:
        path, changes, _ = ASKED[name]
        long = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        self.path, self.body = path, body_of(path, {**long, **changes})
        self.request_id = uuid.uuid4().hex
        self.expected = told(servers.plain, path, self.body, self.request_id)
        self._servers, self._barrier = servers, barrier

    def read(self) -> Told:
        proxy = self._servers.routing.proxy
        with asked(proxy, self.path, self.body, self.request_id) as answer:
            pieces, raw = answer.iter_raw(), b""
            while raw.count(b"\n\n") < NUM_FIRST:
                raw += next(pieces)
            self._barrier.wait(BOUND_SECONDS)
            return Told("", raw + b"".join(pieces))


def test_answers_go_on_at_another_server(servers: Servers) -> None:
    def change() -> None:
        """All clients have something."""
        servers.routing.assign(prefill="prefill", second="decode")
        servers.first.signal_all(signal.SIGKILL)

    barrier = threading.Barrier(len(ASKED), change)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        streams = dict(
            zip(ASKED, pool.map(lambda name: Asked(servers, name, barrier), ASKED), strict=True)
        )
    told(servers.second, COMPLETIONS, body_of(COMPLETIONS, {}))  # it knows of its steps by then
    before = scrape(servers.second.url)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        reading = {name: pool.submit(one.read) for name, one in streams.items()}
        found = {name: one.result(BOUND_SECONDS) for name, one in reading.items()}
    for name, stream in found.items():
        check(name, stream, streams[name].expected)
    page = scrape(servers.routing.proxy.url)
    assert page.total(RESUMES, result="resumed") == page.total(RESUMES) == len(ASKED)
    wait_for_added(servers.second.url, before, FIRST_TOKENS, at_least=len(ASKED))
    added = scrape(servers.second.url).minus(before)
    assert added.total(FIRST_TOKENS, way="resumed") == sum(one[2] for one in ASKED.values())


def check(name: str, stream: Told, expected: Told) -> None:
    assert stream.raw.count(NOTE) == 1, f"{name}: {stream.raw[-500:]!r}"
    whole = Told("", stream.raw.replace(NOTE, b""))
    look = tokens_and_first if name == "a chat with tools" else canonical
    assert look(whole) == look(expected), name
