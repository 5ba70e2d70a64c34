"""Two servers of different versions of vLLM read one another's cache: the answers are the same, and
the blocks were read. COMMEXT_TEST_OTHER_PYTHON is the interpreter that has the other vLLM."""

import os
from collections.abc import Iterator

import pytest

from tests.kit import ROOT, cluster
from tests.kit.metrics import scrape, wait_for_added
from tests.kit.parity import compare, complete, near_enough
from tests.kit.prompts import prompt_set
from tests.kit.servers import VllmServer
from tests.kit.tiny_kinds import KINDS
from tests.kit.tiny_model import write_tiny_model

OTHER = os.environ.get("COMMEXT_TEST_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not OTHER, reason="`make mixed` names the other vLLM's interpreter"),
]
ATOL = 1e-3  # nats, at float32: kernels differ between versions
VISIBLE = 0.2  # nats, at bfloat16: another prompt's answer is further away (`test_tiny_model.py`)
BLOCKS = "vllm:commext_nixl_blocks_total"
FAILURES = "vllm:commext_nixl_failures_total"
MODELS = ("llama", "mla", "granite1", "nemotron", "qwen3next")
"""Dense, latent attention, Mamba2 hybrids, gated delta nets."""
HYBRIDS = MODELS[2:]
HYBRID_ARGS = ["--no-enable-prefix-caching"]
"""vLLM has no kernel on CPUs for Mamba2 whose prefixes are cached."""
LAYOUT = {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}


def options(kind: str) -> list[str]:
    hybrid = HYBRID_ARGS if kind in HYBRIDS else []
    return [*KINDS[kind].cpu_options, *hybrid, "--dtype", KINDS[kind].cpu_dtype]


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def servers(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    folder = tmp_path_factory.mktemp("mixed")
    model = write_tiny_model(folder / "model", kind)
    made: dict[str, VllmServer] = {}
    for name in ("here", "other"):
        config = cluster.kv_transfer_config("kv_both")
        environ = {"PYTHONPATH": str(ROOT), **LAYOUT}  # one state of this package in both
        made[name] = cluster.engine_server(
            name, model, folder, config, args=options(kind), environ=environ
        )
    made["other"].command[0] = OTHER
    with cluster.all_ready(made.values()):
        yield made


@pytest.mark.parametrize(("source", "target"), [("here", "other"), ("other", "here")])
def test_one_reads_the_others_cache(
    servers: dict[str, VllmServer], kind: str, source: str, target: str
) -> None:
    urls = [servers[name].url for name in (source, target)]
    allowed = ATOL if KINDS[kind].cpu_dtype == "float32" else VISIBLE
    before, is_hybrid = scrape(urls[1]), kind in HYBRIDS
    prompts = prompt_set(9, seed=len(source), block_size=cluster.BLOCK_SIZE)
    # Of hybrids a prompt of one token is not handed over, and of two tokens P computes one.
    prompts = [one for one in prompts if len(one) > 2 * is_hybrid][:6]
    for prompt in prompts:
        got = cluster.disaggregated(*urls, cluster.MODEL_NAME, prompt)
        own = complete(urls[0], cluster.MODEL_NAME, prompt)
        difference = compare(own, got, allowed)
        assert difference.max_logprob <= allowed, difference
        assert difference.equal if allowed == ATOL else near_enough(own, got, VISIBLE), difference
    added = wait_for_added(urls[1], before, BLOCKS, at_least=6)
    assert added.total(FAILURES) == 0
    assert "vllm_version" in servers[target].wait_for_log("vllm_version", 30)
