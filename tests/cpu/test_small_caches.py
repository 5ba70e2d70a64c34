"""Engines whose KV caches hold little more than one long request, behind one adaptive proxy."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, complete, stream
from tests.kit.prompts import Prompt, equal_prompts, prompt_set
from tests.kit.servers import ProxyServer, VllmServer

NUM_BLOCKS = 40
CHECK_SECONDS = 1.0
LONG_PROMPT = 900
LONG_ANSWER = 32
"""Tokens. What waiting for room costs is foreseen from the length of answers: a few tokens are soon
over, and less than what prompts take now and then on a busy machine."""
STRANGERS = (100, 110, 120, 130, 140, 150)
"""Tokens of their answers. Two fit at a time and others wait, also while clients are slow, so that
the cache is never so empty that a long prompt fits, whenever the engine is asked."""
STRANGE_PROMPT = 400
NUM_PROMPTS = 15
NUM_AT_ONCE = 12
LIMITS = ("--ttft-ms", "60000", "--tpot-ms")
USE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
PLACED = "commext_proxy_placements_total"


@pytest.fixture(scope="module")
def engines(
    deep_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("engines")
    args = ["--no-enable-prefix-caching", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    made = [
        cluster.engine_server(
            name, deep_model, folder, cluster.kv_transfer_config("kv_both"), args=args
        )
        for name in ("one", "other")
    ]
    with cluster.all_ready(made):
        yield made


@pytest.fixture(scope="module")
def references(engines: list[VllmServer]) -> list[Completion]:
    prompts = prompt_set(NUM_PROMPTS, seed=7, block_size=cluster.BLOCK_SIZE)
    return [complete(engines[0].url, cluster.MODEL_NAME, prompt) for prompt in prompts]


@contextmanager
def proxy_before(
    engines: list[VllmServer], folder: Path, tpot_ms: int, *args: str
) -> Iterator[ProxyServer]:
    urls = [option for engine in engines for option in ("--engine", engine.url)]
    limits = [*LIMITS, str(tpot_ms), "--health-interval", str(CHECK_SECONDS), *args]
    args_of = [*urls, *cluster.PATIENT_PROXY_ARGS, *limits]
    proxy = ProxyServer("proxy", [], [], folder, args=args_of)
    with cluster.all_ready([proxy]):
        yield proxy


def placed_at(proxy: ProxyServer, seed: int, *, number: int = 6, num_at_once: int = 1) -> set[str]:
    """The engines that answer so many long prompts, some at a time."""

    def ask(prompt: Prompt) -> str:
        body = {"model": cluster.MODEL_NAME, "prompt": list(prompt), "max_tokens": LONG_ANSWER}
        body |= {"stream": True, "ignore_eos": True}
        with stream(f"{proxy.url}/v1/completions", body) as response:
            response.read()
            assert response.status_code == 200
            return response.headers["X-Commext-Decode"]

    with ThreadPoolExecutor(num_at_once) as clients:
        return {*clients.map(ask, equal_prompts(number, LONG_PROMPT, seed))}


@contextmanager
def strangers(engine: VllmServer) -> Iterator[None]:
    """Requests that the proxy does not know of."""
    is_over = threading.Event()

    def ask(num_tokens: int) -> None:
        (prompt,) = equal_prompts(1, STRANGE_PROMPT, num_tokens)
        while not is_over.is_set():
            complete(engine.url, cluster.MODEL_NAME, prompt, max_tokens=num_tokens)

    with ThreadPoolExecutor(len(STRANGERS)) as clients:
        asking = [clients.submit(ask, num_tokens) for num_tokens in STRANGERS]
        try:
            while scrape(engine.url).total(USE) < 0.5:
                time.sleep(0.05)
            time.sleep(2 * CHECK_SECONDS)
            yield
        finally:
            is_over.set()
    for one in asking:
        one.result()


def test_an_engine_that_strangers_have_filled_is_avoided(
    engines: list[VllmServer], tmp_path: Path
) -> None:
    with proxy_before(engines, tmp_path, 60000) as proxy:
        assert placed_at(proxy, 1, num_at_once=3) == {"engine0", "engine1"}
        with strangers(engines[0]):
            assert placed_at(proxy, 2, number=3) == {"engine1"}
        time.sleep(3 * CHECK_SECONDS)
        assert placed_at(proxy, 5, num_at_once=3) == {"engine0", "engine1"}


@pytest.mark.parametrize("tpot_ms", [60000, 20], ids=["loose", "tight"])
def test_more_than_fits_waits_for_its_turn_and_is_answered_right(
    engines: list[VllmServer], references: list[Completion], tmp_path: Path, tpot_ms: int
) -> None:
    """Also where prompts wait at one engine for room at the other one."""
    prompts = [one.prompt for one in references]
    with (
        proxy_before(engines, tmp_path, tpot_ms) as proxy,
        ThreadPoolExecutor(NUM_AT_ONCE) as clients,
    ):

        def ask(prompt: Prompt) -> tuple[int, ...]:
            return complete(proxy.url, cluster.MODEL_NAME, prompt, stream=True).token_ids

        answers = [*clients.map(ask, prompts), *clients.map(ask, prompts)]
        page = scrape(proxy.url)
    assert answers == [one.token_ids for one in references] * 2
    assert page.total(PLACED, kind="local") + page.total(PLACED, kind="handed_over") > 0
    for engine in engines:
        complete(engine.url, cluster.MODEL_NAME, prompts[0])  # a step brings the gauge up to date
        assert scrape(engine.url).total(USE) == 0
