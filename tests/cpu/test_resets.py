"""New weights, cleared caches, pauses and sleep of real servers: an answer afterwards is that of a
server that has had these weights all the time, and a paused server keeps nothing."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit import cluster, parity
from tests.kit.crossed import crossed
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.parity import Completion
from tests.kit.servers import ProxyServer, Server, VllmServer
from vllm_commext.nixl.decode.prompt_match import CLOCK_SECONDS

ATOL = 1e-4  # nats, at float32
CHUNK_TOKENS = 128
LEASE_SECONDS = 30.0
"""What is prefilled is read while this lasts, and an engine that was paused for half as long takes
it for ended: on a busy machine new weights take seconds."""
PAUSE_SECONDS = LEASE_SECONDS / 4
NIXL = "vllm:commext_nixl_"
COMPUTED = "vllm:prompt_tokens_by_source_total"
SECRET = "0123456789abcdef" * 2
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1", "COMMEXT_NIXL_SECRET": SECRET}
LENGTHS = (100, 3 * CHUNK_TOKENS + 5)
_dice = random.Random(7)


def new_prompt(num_tokens: int = LENGTHS[0]) -> list[int]:
    """A prompt that no server has seen."""
    return [_dice.randrange(32, 127) for _ in range(num_tokens)]


@dataclass
class Servers:
    """``plain``: one server for each of the models. ``now``: the model that P and D have.
    ``reset_at``: when something last ended what they had computed, at the latest."""

    models: Sequence[Path]
    plain: Sequence[Server]
    prefill: VllmServer
    decode: VllmServer
    proxy: Server
    now: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    reset_at: float = 0.0

    @property
    def engines(self) -> Sequence[Server]:
        return (self.prefill, self.decode)

    def call(self, server: Server, name: str, body: Any = None, **params: Any) -> Any:
        options: dict[str, Any] = {"timeout": 120, "trust_env": False, "verify": parity.tls()}
        answer = httpx.post(f"{server.url}/{name}", params=params, json=body, **options)
        assert answer.status_code == 200, answer.text
        if name != "resume":
            self.reset_at = time.monotonic()
        return answer.json() if answer.content else None

    def wait_for_trust(self) -> None:
        time.sleep(max(0.0, self.reset_at + CLOCK_SECONDS + 0.1 - time.monotonic()))

    def load_other(self, *engines: Server) -> None:
        """Load the other model's weights."""
        for engine in engines:
            self.load(1 - self.now[engine.name], engine)

    def load(self, number: int, *engines: Server) -> None:
        for engine in engines:
            self.now[engine.name] = number
            path = str(self.models[number])
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            self.call(engine, "collective_rpc", body)

    def renew(self, *engines: Server, mode: str = "abort") -> None:
        """Pause, load the other model's weights, resume."""
        for engine in engines:
            self.call(engine, "pause", mode=mode)
        self.load_other(*engines)
        for engine in engines:
            self.call(engine, "resume")

    def asked(
        self, server: Server, prompt: Sequence[int], params: Any = None, **options: Any
    ) -> Completion:
        extra = {} if params is None else {"kv_transfer_params": params}
        return parity.complete(server.url, cluster.MODEL_NAME, prompt, extra=extra, **options)

    def first_of(self, server: Server, prompt: Sequence[int], params: Any = None) -> list[int]:
        """The token ids of an answer without log probabilities, whose first one P may tell."""
        extra = {} if params is None else {"kv_transfer_params": params}
        body = {"model": cluster.MODEL_NAME, "prompt": list(prompt), "max_tokens": 4}
        body |= {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **extra}
        answer = parity.post(f"{server.url}/v1/completions", body)
        return answer.json()["choices"][0]["token_ids"]

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        return parity.prefill(self.prefill.url, cluster.MODEL_NAME, prompt)

    def expected(self, prompt: Sequence[int]) -> Completion:
        """The answer of the weights that D has, which those of the others do not give."""
        own, other = (self.asked(one, prompt) for one in self.plain)
        assert own.token_ids[:1] != other.token_ids[:1], "take another prompt"
        return (own, other)[self.now["decode"]]

    def telling_prompt(self, num_tokens: int) -> list[int]:
        """A prompt after which both models say something else."""
        while True:
            prompt = new_prompt(num_tokens)
            first, other = (self.first_of(server, prompt)[0] for server in self.plain)
            if first != other:
                return prompt

    def held(self) -> float:
        return scrape(self.prefill.url).total(f"{NIXL}held_requests")

    def wait_for_held(self, number: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (held := self.held()) != number:
            assert time.monotonic() < deadline, f"{held:g} are held, not {number}"
            time.sleep(0.05)

    def check_new(self) -> None:
        """P and D serve, and D reads what P computes."""
        self.wait_for_trust()
        before = scrape(self.decode.url)
        prompt = self.telling_prompt(LENGTHS[0])
        assert_same(self.expected(prompt), self.asked(self.proxy, prompt))
        added(self.decode, before, f"{NIXL}blocks_total")


def assert_same(expected: Completion, got: Completion) -> None:
    difference = parity.compare(expected, got, ATOL)
    assert difference.equal, difference


def added(server: Server, before: Metrics, name: str, at_least: float = 1) -> Metrics:
    return wait_for_added(server.url, before, name, at_least=at_least)


@pytest.fixture(scope="module")
def servers(
    model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("resets")
    models = (model, other_model)
    plain = [
        cluster.plain_server(f"plain{number}", path, folder, environ=cluster.PLAIN_ENVIRON)
        for number, path in enumerate(models)
    ]
    extra = {"kv_lease_duration": LEASE_SECONDS}
    chunk = ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
    prefill, decode = (
        cluster.engine_server(
            name,
            model,
            folder,
            cluster.kv_transfer_config(role, extra=extra),
            args=args,
            environ=DEVELOPER,
        )
        for name, role, args in (("prefill", "kv_producer", chunk), ("decode", "kv_consumer", []))
    )
    proxy = ProxyServer(
        "proxy", [prefill.url], [decode.url], folder, args=cluster.PATIENT_PROXY_ARGS
    )
    with cluster.all_ready([*plain, prefill, decode]), proxy:
        yield Servers(models, plain, prefill, decode, proxy)


@pytest.fixture(autouse=True)
def _equal_weights(servers: Servers) -> None:
    """Each test begins with P and D of the same weights, and nothing held, whatever the last one
    has left."""
    for engine in servers.engines:
        servers.call(engine, "resume")
    if servers.now["prefill"] != servers.now["decode"]:
        servers.renew(servers.prefill)
    servers.load(servers.now["decode"], *servers.engines)  # the same last call
    servers.wait_for_trust()
    servers.wait_for_held(0, 2 * LEASE_SECONDS)


@pytest.mark.parametrize(("mode", "length"), crossed(("abort", "keep"), LENGTHS))
def test_a_prompt_that_is_held_while_weights_change_is_answered_by_the_new_ones(
    servers: Servers, mode: str, length: int
) -> None:
    prompts = [servers.telling_prompt(length) for _ in range(2)]
    params = [servers.prefilled(prompt) for prompt in prompts]
    before = scrape(servers.decode.url)
    servers.renew(*servers.engines, mode=mode)
    assert servers.held() == 0
    assert_same(servers.expected(prompts[0]), servers.asked(servers.decode, prompts[0], params[0]))
    own = servers.first_of(servers.plain[servers.now["decode"]], prompts[1])
    assert servers.first_of(servers.decode, prompts[1], params[1]) == own
    moved = added(servers.decode, before, f"{NIXL}first_tokens_total", at_least=2)
    assert moved.total(f"{NIXL}first_tokens_total", way="differs") == 2
    assert moved.total(f"{NIXL}blocks_total") == moved.total(f"{NIXL}failures_total") == 0
    servers.check_new()


@pytest.mark.parametrize(
    "level", [*(pytest.param(one, marks=pytest.mark.long) for one in (0, 1)), 2]
)
def test_a_server_that_slept_uses_nothing_of_before_and_serves(
    servers: Servers, level: int
) -> None:
    """vLLM lets any server be asked to sleep; without --enable-sleep-mode its memory stays."""
    prompt = servers.telling_prompt(LENGTHS[1])
    expected, params = servers.expected(prompt), servers.prefilled(prompt)
    for engine in servers.engines:
        servers.call(engine, "sleep", level=level)
    assert servers.held() == 0
    for engine in servers.engines:
        servers.call(engine, "wake_up")
    if level:
        assert_same(expected, servers.asked(servers.decode, prompt, params))
    servers.check_new()
