"""Two servers of different versions of vLLM read one another's cache: the answers are the same, and
the blocks were read. COMMEXT_TEST_OTHER_PYTHON is the interpreter that has the other vLLM.
"""

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.kit import ROOT
from vllm_commext.testing import cluster
from vllm_commext.testing.metrics import scrape, wait_for_added
from vllm_commext.testing.parity import compare, complete
from vllm_commext.testing.prompts import prompt_set
from vllm_commext.testing.servers import VllmServer
from vllm_commext.testing.tiny_kinds import KINDS
from vllm_commext.testing.tiny_model import write_tiny_model

OTHER = os.environ.get("COMMEXT_TEST_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not OTHER, reason="`make mixed` names the other vLLM's interpreter"),
]
ATOL = 1e-3  # nats, at float32: kernels differ between versions
BLOCKS = "vllm:commext_nixl_blocks_total"
FAILURES = "vllm:commext_nixl_failures_total"
MODELS = ("llama", "mla")
"""Dense, and latent attention, which needs vLLM 0.30 on CPUs. No hybrids: vLLM 0.30 has no
float32 kernel for their convolution on processors with AVX-512."""
VERSION = "from vllm.version import __version_tuple__ as one; print(one[1])"


def is_dense_alone() -> bool:
    """Whether of these models only the dense one runs on the other vLLM."""
    done = subprocess.run(
        [OTHER, "-c", VERSION], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout.split()[-1]) < 30


@pytest.fixture(scope="module", params=MODELS)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmServer]]:
    kind = request.param
    if kind != "llama" and is_dense_alone():
        pytest.skip(f"{kind} does not run on CPUs with the connector before vLLM 0.30")
    folder = tmp_path_factory.mktemp("mixed")
    model = write_tiny_model(folder / "model", kind)
    made: dict[str, VllmServer] = {}
    for name in ("here", "other"):
        config = cluster.kv_transfer_config("kv_both")
        environ = {"PYTHONPATH": str(ROOT)}  # one state of this package in both
        made[name] = cluster.engine_server(
            name,
            model,
            folder,
            config,
            args=KINDS[kind].cpu_options,
            environ=environ,
        )
    made["other"].command[0] = OTHER
    with cluster.all_ready(made.values()):
        yield made


@pytest.mark.parametrize(("source", "target"), [("here", "other"), ("other", "here")])
def test_one_reads_the_others_cache(
    servers: dict[str, VllmServer], source: str, target: str
) -> None:
    urls = [servers[name].url for name in (source, target)]
    before = scrape(urls[1])
    for prompt in prompt_set(6, seed=len(source), block_size=cluster.BLOCK_SIZE):
        got = cluster.disaggregated(*urls, cluster.MODEL_NAME, prompt)
        difference = compare(complete(urls[0], cluster.MODEL_NAME, prompt), got, ATOL)
        assert difference.equal, difference
    added = wait_for_added(urls[1], before, BLOCKS, at_least=6)
    assert added.total(FAILURES) == 0
    assert "vllm_version" in servers[target].wait_for_log("vllm_version", 30)
