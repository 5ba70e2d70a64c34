"""Two `kv_both` engines behind one proxy: whoever takes which step, tokens are the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, complete, tls
from tests.kit.prompts import Prompt, equal_prompts, prompt_set
from tests.kit.servers import ProxyServer, VllmServer

NUM_PROMPTS = 9
NUM_AT_ONCE = 6
PLACED = "commext_proxy_placements_total"


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("engines")
    made = [
        cluster.engine_server(
            name,
            model,
            folder,
            cluster.kv_transfer_config("kv_both"),
            args=["--no-enable-prefix-caching"],
        )
        for name in ("one", "other")
    ]
    with cluster.all_ready(made):
        yield made


@pytest.fixture(scope="module")
def references(engines: list[VllmServer]) -> list[Completion]:
    prompts = prompt_set(NUM_PROMPTS, seed=5, block_size=cluster.BLOCK_SIZE)
    return [complete(engines[0].url, cluster.MODEL_NAME, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("args", "kinds"),
    [
        pytest.param(["--placement", "local"], {"least_work"}, id="local", marks=pytest.mark.long),
        pytest.param(["--placement", "fixed"], set[str](), id="handed over"),
        pytest.param(
            ["--ttft-ms", "60000", "--tpot-ms", "60000"],
            {"local"},
            id="loose",
            marks=pytest.mark.long,
        ),
        pytest.param(["--tpot-ms", "1"], {"least_work"}, id="tight"),
    ],
)
def test_answers_are_the_same_wherever_a_request_is_placed(
    engines: list[VllmServer],
    references: list[Completion],
    tmp_path: Path,
    args: list[str],
    kinds: set[str],
) -> None:
    urls = [option for engine in engines for option in ("--engine", engine.url)]
    proxy = ProxyServer("proxy", [], [], tmp_path, args=[*urls, *cluster.PATIENT_PROXY_ARGS, *args])
    with cluster.all_ready([proxy]), ThreadPoolExecutor(NUM_AT_ONCE) as clients:

        def ask(prompt: Prompt) -> Completion:
            return complete(proxy.url, cluster.MODEL_NAME, prompt, stream=True)

        prompts = [one.prompt for one in references]
        answers = [*clients.map(ask, prompts), *clients.map(ask, prompts)]
        page = scrape(proxy.url)
        told = httpx.get(f"{proxy.url}/health", verify=tls()).json()
    for answer, expected in zip(answers, references * 2, strict=True):
        assert answer.token_ids == expected.token_ids
    assert told["status"] == "ok"
    assert all(page.total(PLACED, kind=kind) for kind in kinds)
    if not kinds:
        assert page.total("commext_proxy_affinity_tokens_total", role="prefill") > 0


@pytest.mark.long
def test_answers_stay_the_same_while_the_load_changes(
    engines: list[VllmServer], tmp_path: Path
) -> None:
    """Long prompts beside answers that run, and then short ones with long answers."""
    running = [(one, 120) for one in equal_prompts(6, 40, 31)]
    loads = [[*running, *((one, 4) for one in equal_prompts(10, 900, 32))]]
    loads.append([(one, 60) for one in equal_prompts(12, 12, 33)])

    def answer(url: str, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        name = cluster.MODEL_NAME
        return complete(url, name, prompt, max_tokens=max_tokens, stream=True).token_ids

    urls = [option for engine in engines for option in ("--engine", engine.url)]
    limits = ["--ttft-ms", "2000", "--tpot-ms", "30"]
    args = [*urls, *cluster.PATIENT_PROXY_ARGS, *limits]
    with (
        cluster.all_ready([proxy := ProxyServer("proxy", [], [], tmp_path, args=args)]),
        ThreadPoolExecutor(9) as clients,
    ):
        right, *found = (
            [[*clients.map(partial(answer, url), *zip(*load, strict=True))] for load in loads]
            for url in (engines[0].url, proxy.url, proxy.url)
        )
    assert found == [right, right]
