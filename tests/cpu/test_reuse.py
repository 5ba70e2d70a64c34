"""Conversations through a proxy that names to P which decode server may have their blocks: answers
are those of a plain server, and P computes what is new and at most a block."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.kit import cluster, parity
from tests.kit.cluster import BLOCK_SIZE
from tests.kit.installed import VLLM
from tests.kit.metrics import Metrics, scrape, wait_for_added
from tests.kit.parity import Completion
from tests.kit.prompts import PRINTABLE
from tests.kit.servers import ProxyServer, Server, VllmServer

pytestmark = pytest.mark.skipif(
    Version("0.32") > VLLM, reason="vLLM before 0.32 tells of no block's reuse"
)
ATOL = 1e-4  # nats, at float32
FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS, NUM_TURNS = 400, 30, 40, 4
DECODE_BLOCKS = 64
"""Two conversations' at their end and a half."""
COMPUTED = "vllm:prompt_tokens_by_source_total"
REUSED = "vllm:commext_nixl_reuse_blocks_total"
IN_VAIN = "vllm:commext_nixl_reuse_recomputed_blocks_total"
LOOKUPS = "vllm:commext_nixl_reuse_lookups_total"
SECRET = "0123456789abcdef" * 2


@dataclass
class Servers:
    plain: VllmServer
    prefill: VllmServer
    decode: VllmServer
    on: Server
    off: Server


@contextmanager
def started(model: Path, folder: Path, p_tp: int = 1, d_tp: int = 1) -> Iterator[Servers]:
    environ = {"COMMEXT_NIXL_SECRET": SECRET}
    made = [cluster.plain_server("plain", model, folder)]
    for name, role, tp, args in (
        # What P has of a conversation by itself is none of these tests'.
        ("prefill", "kv_producer", p_tp, ["--no-enable-prefix-caching"]),
        ("decode", "kv_consumer", d_tp, ["--num-gpu-blocks-override", str(DECODE_BLOCKS)]),
    ):
        extra = {"reuse_blocks": True, "reuse_lookup_timeout": 60.0, "reuse_min_tokens": 0}
        config = cluster.kv_transfer_config(role, extra=extra)
        options: dict[str, Any] = {"args": args, "environ": environ, "tensor_parallel_size": tp}
        made.append(cluster.engine_server(name, model, folder, config, **options))
    with cluster.all_ready(made), ExitStack() as stack:
        plain, prefill, decode = made
        proxies = [
            stack.enter_context(
                ProxyServer(
                    name,
                    [prefill.url],
                    [decode.url],
                    folder,
                    args=[*cluster.PATIENT_PROXY_ARGS, *args],
                )
            )
            for name, args in (("on", ["--reuse-blocks"]), ("off", []))
        ]
        yield Servers(plain, prefill, decode, *proxies)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with started(model, tmp_path_factory.mktemp("reuse")) as made:
        yield made


class Conversation:
    """Asked turn by turn, of a plain server at the same time."""

    def __init__(self, servers: Servers, proxy: Server, seed: int, **extra: Any) -> None:
        self._servers = servers
        self._proxy = proxy
        self._dice = random.Random(seed)
        self._extra = extra
        self.tokens: list[int] = []

    def turn(self) -> tuple[int, Completion, Completion]:
        """The tokens that are new to who has seen all before, and both answers."""
        count = NEW_TOKENS if self.tokens else FIRST_TOKENS
        self.tokens += [self._dice.choice(PRINTABLE) for _ in range(count)]
        expected = self._ask(self._servers.plain)
        got = self._ask(self._proxy)
        self.tokens += expected.token_ids
        return count, expected, got

    def _ask(self, server: Server) -> Completion:
        return parity.complete(
            server.url, cluster.MODEL_NAME, self.tokens, max_tokens=ANSWER_TOKENS, extra=self._extra
        )


def assert_same(expected: Completion, got: Completion) -> None:
    difference = parity.compare(expected, got, ATOL)
    assert difference.tokens_equal, difference
    assert difference.max_logprob <= ATOL, difference


def added(server: Server, earlier: Metrics, num_requests: int = 1) -> Metrics:
    return wait_for_added(server.url, earlier, "vllm:request_success_total", num_requests)


def turns(
    servers: Servers, proxy: Server, seed: int, **extra: Any
) -> tuple[Sequence[int], Sequence[Metrics], Sequence[int]]:
    talk = Conversation(servers, proxy, seed, **extra)
    news, figures, lengths = [], [], []
    for _ in range(NUM_TURNS):
        before = scrape(servers.prefill.url)
        new, expected, got = talk.turn()
        assert_same(expected, got)
        news.append(new)
        figures.append(added(servers.prefill, before))
        lengths.append(len(talk.tokens) - ANSWER_TOKENS)
    return news, figures, lengths


def computed(figures: Metrics) -> float:
    return figures.total(COMPUTED, source="local_compute")


def test_each_further_turn_computes_what_is_new_and_at_most_a_block(servers: Servers) -> None:
    assert_only_new_is_computed(servers, 1)


def assert_only_new_is_computed(servers: Servers, seed: int) -> None:
    news, figures, lengths = turns(servers, servers.on, seed)
    assert figures[0].total(REUSED) == 0
    for new, one, length in zip(news[1:], figures[1:], lengths[1:], strict=True):
        reused = one.total(REUSED)
        # The token that was said last was never computed by anybody.
        assert reused == (length - new - 1) // BLOCK_SIZE
        assert one.total(IN_VAIN) == 0
        assert computed(one) == length - reused * BLOCK_SIZE <= new + BLOCK_SIZE


def test_without_the_proxys_option_all_is_computed(servers: Servers) -> None:
    _, figures, lengths = turns(servers, servers.off, 2)
    assert [computed(one) for one in figures] == lengths
    assert all(one.total(LOOKUPS) == 0 for one in figures)


def test_another_tenant_begins_from_nothing(servers: Servers) -> None:
    """The same tokens with another salt, and with the first one again."""
    talk = Conversation(servers, servers.on, 3, cache_salt="one")
    _, expected, got = talk.turn()
    assert_same(expected, got)
    tokens = list(talk.tokens)
    for salt, has_blocks in (("two", False), ("one", True)):
        before = scrape(servers.prefill.url)
        # P is told of the decode server by hand: the proxy keeps tenants apart, too.
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        params |= {"reuse_from": [place_of(servers.decode)]}
        body = {
            "model": cluster.MODEL_NAME,
            "prompt": tokens,
            "max_tokens": 1,
            "cache_salt": salt,
            "kv_transfer_params": params,
        }
        parity.post(f"{servers.prefill.url}/v1/completions", body)
        one = added(servers.prefill, before)
        assert one.total(LOOKUPS) == 1
        assert (one.total(REUSED) > 0) == has_blocks


def place_of(server: Server) -> dict[str, Any]:
    (labels,) = [
        dict(labels)
        for name, labels in scrape(server.url).samples
        if name == "vllm:commext_nixl_info"
    ]
    return {"host": labels["host"], "port": int(labels["port"]), "seal": labels["seal"]}


def test_a_place_that_the_secret_does_not_prove_is_not_asked(servers: Servers) -> None:
    place = place_of(servers.decode)
    prompt = [PRINTABLE[0]] * FIRST_TOKENS
    for wrong in ({"port": place["port"] + 1}, {"seal": ""}, {"seal": "0" * 64}):
        before = scrape(servers.prefill.url)
        params = {"do_remote_decode": True, "reuse_from": [{**place, **wrong}]}
        body = {
            "model": cluster.MODEL_NAME,
            "prompt": prompt,
            "max_tokens": 1,
            "kv_transfer_params": params,
        }
        parity.post(f"{servers.prefill.url}/v1/completions", body)
        one = added(servers.prefill, before)
        assert (one.total(LOOKUPS), computed(one)) == (0, FIRST_TOKENS)


def test_no_answer_is_wrong_while_blocks_are_used_again(servers: Servers) -> None:
    """More conversations at a time than the decode server has blocks for: some of what each has
    said is gone by its next turn."""
    before = scrape(servers.prefill.url)
    talks = [Conversation(servers, servers.on, 10 + number) for number in range(5)]
    with ThreadPoolExecutor(len(talks)) as pool:
        for _ in range(NUM_TURNS):
            for _, expected, got in pool.map(Conversation.turn, talks):
                assert_same(expected, got)
    one = added(servers.prefill, before, len(talks) * NUM_TURNS)
    lengths = sum(
        FIRST_TOKENS + turn * (NEW_TOKENS + ANSWER_TOKENS) for turn in range(NUM_TURNS)
    ) * len(talks)
    assert one.total(LOOKUPS) == len(talks) * (NUM_TURNS - 1)
    assert 0 < one.total(REUSED) * BLOCK_SIZE < lengths - len(talks) * FIRST_TOKENS
    assert computed(one) > len(talks) * NUM_TURNS * NEW_TOKENS


@pytest.mark.long
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (2, 1), (2, 2)])
def test_between_other_numbers_of_ranks(model: Path, tmp_path: Path, p_tp: int, d_tp: int) -> None:
    """Workers in processes of their own, each with a part of every block: all are proven."""
    with started(model, tmp_path, p_tp, d_tp) as servers:
        assert_only_new_is_computed(servers, 1)
