"""Conversations and changing load on two engines without roles: where requests are placed, what
engines compute of them, and that answers stay those of one engine."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import complete
from tests.kit.prompts import PRINTABLE, Prompt, equal_prompts
from tests.kit.servers import ProxyServer, Server, VllmServer

FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 840, 40, 4
"""Of a conversation. Of two idle engines a turn goes to the one that is expected to end it first.
So its history has to take longer than the engines' steps, as measured on a busy machine, differ by.
"""
NUM_CONVERSATIONS, NUM_TURNS = 4, 3
HITS = "vllm:prefix_cache_hits_total"
PLACED = "commext_proxy_placements_total"
NO_CACHE = "--no-enable-prefix-caching"
LIMIT_FACTORS = (1.3, 1.0, 1.7, 2.5)
"""Of what a token takes beside five other answers; how much it takes with all else is not known."""


@pytest.fixture(scope="module")
def engines(
    deep_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("engines")
    made = [
        cluster.engine_server(name, deep_model, folder, cluster.kv_transfer_config("kv_both"))
        for name in ("one", "other")
    ]
    with cluster.all_ready(made):
        yield made


@pytest.fixture
def forgetful(deep_model: Path, tmp_path: Path) -> Iterator[list[VllmServer]]:
    """Engines that compute each prompt anew."""
    made = [
        cluster.engine_server(
            name, deep_model, tmp_path, cluster.kv_transfer_config("kv_both"), args=[NO_CACHE]
        )
        for name in ("here", "there")
    ]
    with cluster.all_ready(made):
        yield made


@contextmanager
def proxy_before(engines: Sequence[Server], folder: Path, *args: str) -> Iterator[ProxyServer]:
    urls = [option for engine in engines for option in ("--engine", engine.url)]
    proxy = ProxyServer("proxy", [], [], folder, args=[*urls, *cluster.PATIENT_PROXY_ARGS, *args])
    with cluster.all_ready([proxy]):
        yield proxy


def answer(url: str, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    return complete(url, cluster.MODEL_NAME, prompt, max_tokens=max_tokens, stream=True).token_ids


def test_later_turns_go_where_their_history_is(engines: list[VllmServer], tmp_path: Path) -> None:
    """Each conversation stays at one engine; those that begin at the same time may do at either."""
    dice = random.Random(10)
    talks = [dice.choices(PRINTABLE, k=FIRST_TOKENS) for _ in range(NUM_CONVERSATIONS)]
    with (
        proxy_before(engines, tmp_path, "--ttft-ms", "60000", "--tpot-ms", "60000") as proxy,
        ThreadPoolExecutor(NUM_CONVERSATIONS) as clients,
    ):
        for prompt in equal_prompts(4, 100, 30):  # until engines' speed is known
            answer(proxy.url, prompt, ANSWER_TOKENS)
        begun = clients.map(lambda talk: answer(proxy.url, talk, ANSWER_TOKENS), talks)
        for talk, tokens in zip(talks, begun, strict=True):
            talk += tokens
        before = [scrape(engine.url).total(HITS) for engine in engines]
        possible = 0
        for _ in range(NUM_TURNS):
            for talk in talks:
                possible += (len(talk) - 1) // cluster.BLOCK_SIZE * cluster.BLOCK_SIZE
                talk += dice.choices(PRINTABLE, k=NEW_TOKENS)
                talk += answer(proxy.url, talk, ANSWER_TOKENS)
    pairs = zip(engines, before, strict=True)
    hits = [scrape(engine.url).total(HITS) - earlier for engine, earlier in pairs]
    # What takes longer elsewhere is measured, and a machine that is busy says so now and then.
    assert sum(hits) >= 0.85 * possible


def test_answers_stay_the_same_while_the_load_changes(
    engines: list[VllmServer], tmp_path: Path
) -> None:
    """Long prompts beside answers that run, and then short ones with long answers."""
    running: list[Prompt] = equal_prompts(6, 40, 31)
    prompts, short = equal_prompts(10, 900, 32), equal_prompts(12, 12, 33)
    loads = [[(one, 120) for one in running] + [(one, 4) for one in prompts]]
    loads.append([(one, 60) for one in short])
    alone = partial(answer, engines[0].url)
    with (
        proxy_before(engines, tmp_path, "--ttft-ms", "2000", "--tpot-ms", "30") as proxy,
        ThreadPoolExecutor(9) as clients,
    ):
        expected = [[*clients.map(alone, *zip(*load, strict=True))] for load in loads]
        for load, right in [*zip(loads, expected, strict=True)] * 2:
            got = [*clients.map(partial(answer, proxy.url), *zip(*load, strict=True))]
            assert got == right
        page = scrape(proxy.url)
    assert page.total(PLACED, kind="local") + page.total(PLACED, kind="handed_over") > len(prompts)


def shares_handed_over(
    proxy: Server, loads: Sequence[Sequence[tuple[Prompt, int]]], right: Sequence[object]
) -> list[float]:
    """Shares of loads one after the other that went to two engines; their answers are checked."""
    shares, before = list[float](), (0.0, 0.0)
    with ThreadPoolExecutor(9) as clients:
        for load, expected in zip(loads, right, strict=True):
            assert [*clients.map(partial(answer, proxy.url), *zip(*load, strict=True))] == expected
            page = scrape(proxy.url)
            now = page.total(PLACED, kind="handed_over"), page.total(PLACED)
            shares.append((now[0] - before[0]) / (now[1] - before[1]))
            before = now
    return shares


@pytest.mark.long
@pytest.mark.timeout(900)
def test_roles_come_and_go_with_the_load(forgetful: list[VllmServer], tmp_path: Path) -> None:
    """Long prompts beside answers are handed over to save these: one engine prefills, the other one
    decodes. With short ones each does both. When long ones come back it is as before."""
    running: list[Prompt] = equal_prompts(6, 40, 41)
    prompts, short = equal_prompts(18, 900, 42), equal_prompts(24, 12, 43)
    long = [(one, 150) for one in running] + [(one, 4) for one in prompts]
    loads = [long, [(one, 60) for one in short]]
    url = forgetful[0].url
    right = [[answer(url, *one) for one in load] for load in loads]
    with ThreadPoolExecutor(6) as clients:
        started = time.monotonic()
        list(clients.map(partial(answer, url), running, [150] * 6))
        token_ms = (time.monotonic() - started) / 150 * 1e3
    told: list[str] = []
    for factor in LIMIT_FACTORS:
        limits = ("--ttft-ms", "5000", "--tpot-ms", str(round(token_ms * factor)), "--no-affinity")
        with proxy_before(forgetful, tmp_path, *limits) as proxy:
            shares = shares_handed_over(proxy, loads * 2, right * 2)
        told.append(f"{limits[3]} ms: " + " ".join(f"{share:.0%}" for share in shares))
        if min(shares[0], shares[2]) > max(0.1, 2 * shares[1], 2 * shares[3]):
            return
    pytest.fail(f"handed over of long, short, long, short: {told}")
