"""A real server of a vLLM that has lost what later releases have announced to take away, or may: it
starts, serves, and says once which parts of ours it lacks."""

import os
from pathlib import Path

import pytest
from packaging.version import Version

from tests.kit import altered_vllm, cluster
from tests.kit.altered_vllm import COSTS, VERSION
from tests.kit.installed import VLLM
from tests.kit.parity import complete
from tests.kit.prompts import equal_prompts
from vllm_commext.compat.fits import NEWEST

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(Version(NEWEST) > VLLM, reason="what the newest release has announced"),
    pytest.mark.skipif(
        os.environ.get("COMMEXT_TEST_FORK") != "0", reason="a server of another vLLM is not forked"
    ),
]


def test_it_serves_and_says_once_what_it_lacks(model: Path, tmp_path: Path) -> None:
    root = altered_vllm.make(tmp_path / "altered", *COSTS)
    server = cluster.engine_server(
        "announced",
        model,
        tmp_path,
        cluster.kv_transfer_config("kv_both"),
        tensor_parallel_size=2,
        environ={"PYTHONPATH": os.pathsep.join([str(root), str(ROOT)])},
    )
    with server:
        server.wait_ready()
        for prompt in equal_prompts(2, 40, seed=7):
            assert len(complete(server.url, cluster.MODEL_NAME, prompt).token_ids) == 16
    lines = server.log_path.read_text().splitlines()
    [told] = [line for line in lines if "WARNING" in line and "commext" in line]
    assert f"no test was run on vLLM {VERSION}" in told
    for part in ("engine step", "nixl first token", "nixl reuse", "nixl states", "shm_queue"):
        assert part in told.partition("; off: ")[2]
    assert any("idle sleep disabled" in line for line in lines)
