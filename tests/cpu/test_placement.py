"""Two `kv_both` engines behind one proxy: whoever takes which step, tokens are the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.kit import cluster
from tests.kit.metrics import scrape
from tests.kit.parity import Completion, complete, tls
from tests.kit.prompts import Prompt, prompt_set
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
        pytest.param(["--placement", "local"], {"least_work"}, id="local"),
        pytest.param(["--placement", "fixed"], set[str](), id="handed over"),
        pytest.param(["--ttft-ms", "60000", "--tpot-ms", "60000"], {"local"}, id="loose"),
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
