"""A decode server that is killed in mid-stream, or drained: its answers go on at another one, and
clients are told, but for times, what a plain server tells them."""

import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.event_streams import (
    CHAT,
    COMPLETIONS,
    FIRST_TOKENS,
    Told,
    asked,
    body_of,
    canonical,
    tokens_and_first,
    tokens_and_words,
    told,
)
from tests.cpu.test_first_token import TOOLS, with_markup
from tests.kit import cluster, fleet
from tests.kit.fleet import Routing
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.prompts import CHAT_TEMPLATE
from tests.kit.servers import Server, VllmServer
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_lora import write_lora
from tests.kit.tiny_model import write_tiny_model
from tests.kit.tiny_rotors import draw_rotors
from vllm_commext import private_files
from vllm_commext.proxy.errors_phases import Resume

NUM_TOKENS, NUM_FIRST = 800, 5
"""The engine drains, or is killed, when each client has the first ones. It goes on meanwhile, so on
a busy machine short answers have ended by then."""
BOUND_SECONDS = 300.0
logger = logging.getLogger("vllm.commext.tests")

HEALTHY = "commext_proxy_engines_healthy"
PAUSES = "commext_proxy_move_pause_seconds"
MOVES, RESUMES = "commext_proxy_moves_total", "commext_proxy_resumes_total"
ENDED = "vllm:request_success_total"
NOTE = b',"commext_resumed":1'
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
CONTINUOUS: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}
}
REUSED = "vllm:commext_nixl_reuse_blocks_total"
ADAPTER, OTHER = "adapted", "adapted otherwise by the second"
# Kinds of models, whether servers offer blocks to one another, and what else they do.
SERVED = (
    pytest.param(("llama", True, ""), id="llama"),
    pytest.param(("llama", False, ""), marks=pytest.mark.long, id="llama without reuse"),
    pytest.param(("llama", True, ADAPTER), marks=pytest.mark.long, id="lora"),
    pytest.param(("llama", True, OTHER), marks=pytest.mark.long, id="another lora"),
    pytest.param(("granite1", False, ""), marks=pytest.mark.long, id="granite1"),
    pytest.param(("qwen3next", False, ""), marks=pytest.mark.long, id="qwen3next"),
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
MOVED = (
    *("usage", "token ids", "a stop string that does not come", "a seed", "log probabilities"),
    *("a chat", "a chat with token ids", "a chat with tools"),
)
ALWAYS = ("token ids", "a seed", "a chat with token ids")


@dataclass
class Servers:
    plain: Server
    prefill: VllmServer
    first: VllmServer
    second: VllmServer
    folder: Path
    reuses: bool
    does: str
    routing: Routing = field(init=False)

    @property
    def model(self) -> str:
        return ADAPTER if self.does else cluster.MODEL_NAME

    def asked(self, names: Iterable[str]) -> list[str]:
        """Those of these that are asked for now."""
        wanted = ASKED if os.environ.get("COMMEXT_TEST_LONG") else ALWAYS
        return [name for name in names if name in wanted]

    @property
    def drain_file(self) -> Path:
        return fleet.drain_file(self.folder, "first")

    @contextmanager
    def proxied(self, *args: str) -> Iterator[Server]:
        """Another proxy, whose decode server is the first one."""
        folder = Path(tempfile.mkdtemp(prefix="proxy", dir=self.folder))
        self.routing = Routing(
            folder,
            {"prefill": self.prefill, "first": self.first, "second": self.second},
            args,
            {"move_pause_seconds": 120.0},
        )
        self.routing.assign(prefill="prefill", first="decode")
        with self.routing.proxy:
            yield self.routing.proxy


@pytest.fixture(scope="module", params=SERVED)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    kind, reuses, does = request.param
    folder = tmp_path_factory.mktemp(kind)
    # Where a slow reader's events are merged, vLLM's parser drops the text before this token.
    draw = draw_rotors if kind == "qwen3next" else None
    written = write_tiny_model(folder / kind, kind, draw=draw)
    model = with_markup(written, folder / "model", "<think>")
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    args = [*KINDS[kind].cpu_options, "--chat-template", str(template)]
    args += [] if kind == "llama" else ["--no-enable-prefix-caching"]
    args += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args += ["--reasoning-parser", "deepseek_r1"]  # holds nothing back that the end could leave out
    named: dict[str, list[str]] = {}
    if does:
        args += ["--enable-lora", "--max-lora-rank", "8"]
        paths = [write_lora(folder / f"lora{seed}", model, seed) for seed in range(2)]
        first, second = (["--lora-modules", f"{ADAPTER}={path}"] for path in paths)
        args += first
        named = {"second": second} if does == OTHER else named
    plain = cluster.plain_server("plain", model, folder, args=args, environ=cluster.PLAIN_ENVIRON)
    roles = {"prefill": "kv_producer", "first": "kv_consumer", "second": "kv_consumer"}
    made = {
        name: cluster.engine_server(
            name,
            model,
            folder,
            cluster.kv_transfer_config(role, extra={"reuse_blocks": reuses}),
            args=[*args, *named.get(name, ()), *fleet.DRAIN_ARGS],
            environ=fleet.drain_environ(folder, name),
        )
        for name, role in roles.items()
    }
    with cluster.all_ready([plain, *made.values()]):
        yield Servers(plain, **made, folder=folder, reuses=reuses, does=does)
        for one in made.values():  # asked to end they would wait for the reader that was killed
            one.signal_all(signal.SIGKILL)


class Asked:
    """A stream that is read by a thread of its own, and stays where it is after its first events
    until it is let go."""

    def __init__(self, servers: Servers, name: str, barrier: threading.Barrier) -> None:
        path, changes, _ = ASKED[name]
        long = {"model": servers.model, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        self.path, self.body = path, body_of(path, {**long, **changes})
        self.request_id = uuid.uuid4().hex
        self._servers, self._barrier = servers, barrier

    def expect(self) -> Told:
        return told(self._servers.plain, self.path, self.body, self.request_id)

    def read(self) -> Told:
        proxy = self._servers.routing.proxy
        with asked(proxy, self.path, self.body, self.request_id) as answer:
            pieces, raw = answer.iter_raw(), b""
            while raw.count(b"\n\n") < NUM_FIRST:
                raw += next(pieces)
            self._barrier.wait(BOUND_SECONDS)
            return Told("", raw + b"".join(pieces))


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "not moved"])
@pytest.mark.long
def test_answers_leave_a_server_that_drains(servers: Servers, moves: bool) -> None:
    """Where they are not moved, as a control, each ends where it has begun."""

    def change() -> None:
        servers.routing.assign(prefill="prefill", first="decode", second="decode")
        deadline = time.monotonic() + BOUND_SECONDS
        while scrape(proxy.url).total(HEALTHY, role="decode") < 2:
            assert time.monotonic() < deadline, "the proxy does not know the other server"
            time.sleep(0.05)
        private_files.make(servers.drain_file)

    with servers.proxied(*([] if moves else ["--no-move"])) as proxy:
        names = servers.asked(MOVED)
        barrier = threading.Barrier(len(names), change)
        streams = {name: Asked(servers, name, barrier) for name in names}
        before = {one.name: scrape(one.url) for one in (servers.first, servers.second)}
        expected = in_threads({name: one.expect for name, one in streams.items()})
        found = in_threads({name: one.read for name, one in streams.items()})
        fleet.drain(servers.first, servers.drain_file)
        page = scrape(proxy.url)
    servers.drain_file.unlink()
    results = by_result(page)
    num_moved = int(results.get(Resume.RESUMED, 0))
    pauses = page.total(f"{PAUSES}_sum"), page.total(f"{PAUSES}_count")
    logger.info("moved: %s; pauses of %s s in all %s", results, *pauses)
    for name, stream in found.items():
        check(name, stream, expected[name])
    if servers.does == OTHER:
        assert results == {Resume.FAILED if moves else Resume.OFF: len(names)}
        return
    # Parsers may cut a chat otherwise where all tokens come at once: it stays.
    gone = {name for name, stream in found.items() if NOTE in stream.raw}
    assert len(gone) == num_moved
    assert page.total(MOVES) == len(names)
    assert page.total(RESUMES) == 0
    left, took = (
        scrape(one.url).minus(before[one.name]) for one in (servers.first, servers.second)
    )
    num_more = left.total(ENDED, finished_reason="length") - (len(names) - num_moved)
    assert 0 <= num_more <= num_moved  # until it is let go, the first one goes on with those
    assert took.total(ENDED, finished_reason="length") >= num_moved
    num_read = sum(ASKED[name][2] for name in gone) * servers.reuses
    took = wait_for_added(servers.second.url, before["second"], REUSED, at_least=num_read)
    assert took.total(REUSED) >= num_read
    assert servers.reuses or not took.total(REUSED)
    if moves:
        assert results.keys() <= {Resume.RESUMED, Resume.DIFFERS, Resume.ENDING}
        # What is begun anew may end first.
        sure = {name for name in names if ASKED[name][0] == COMPLETIONS and ASKED[name][2]}
        assert gone >= sure, results
    else:
        assert results == {Resume.OFF: len(names)}


def by_result(page: Metrics) -> dict[str, float]:
    return {one: count for one in Resume if (count := page.total(MOVES, result=one))}


def in_threads(told_by: Mapping[str, Callable[[], Told]]) -> dict[str, Told]:
    with ThreadPoolExecutor(len(told_by)) as pool:
        reading = {name: pool.submit(one) for name, one in told_by.items()}
        return {name: one.result(BOUND_SECONDS) for name, one in reading.items()}


def test_answers_go_on_at_another_server(servers: Servers) -> None:
    def change() -> None:
        servers.routing.assign(prefill="prefill", second="decode")
        servers.first.signal_all(signal.SIGKILL)

    told(servers.second, COMPLETIONS, body_of(COMPLETIONS, {}))  # it knows of its steps by then
    with servers.proxied() as proxy:
        names = servers.asked(ASKED)
        barrier = threading.Barrier(len(names), change)
        streams = {name: Asked(servers, name, barrier) for name in names}
        expected = in_threads({name: one.expect for name, one in streams.items()})
        before = scrape(servers.second.url)
        found = in_threads({name: one.read for name, one in streams.items()})
        page = scrape(proxy.url)
    if servers.does == OTHER:
        assert page.total(RESUMES, result="failed") == page.total(RESUMES) == len(names)
        assert all(b'"error"' in stream.raw and NOTE not in stream.raw for stream in found.values())
        return
    for name, stream in found.items():
        assert stream.raw.count(NOTE) == 1, f"{name}: {stream.raw[-500:]!r}"
        check(name, stream, expected[name])
    assert page.total(RESUMES, result="resumed") == page.total(RESUMES) == len(names)
    wait_for_added(servers.second.url, before, FIRST_TOKENS, at_least=len(names))
    added = scrape(servers.second.url).minus(before)
    num_going = sum(ASKED[name][2] for name in names)
    assert added.total(FIRST_TOKENS, way="resumed") == num_going
    generated = added.total("vllm:generation_tokens_total")  # those of the first server are its own
    assert 0 < generated <= NUM_TOKENS * len(names) - (NUM_FIRST - 2) * num_going


def check(name: str, stream: Told, expected: Told) -> None:
    whole = Told("", stream.raw.replace(NOTE, b""))
    of_chats = tokens_and_first if name == "a chat with tools" else tokens_and_words
    look = of_chats if ASKED[name][0] == CHAT else canonical
    assert look(whole) == look(expected), name
