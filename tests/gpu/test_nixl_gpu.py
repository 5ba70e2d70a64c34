"""Prefill on one GPU, decode on another: real servers, answers compared with the prefill engine's.

The oracle is exact. The decode engine computes only the last token of a prompt; so does the prefill
engine where its prefix cache holds all the other tokens, which it does for a prompt of one token
more than a whole number of blocks that was asked before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_commext.testing.cluster import disaggregated
from vllm_commext.testing.metrics import scrape
from vllm_commext.testing.parity import compare, complete
from vllm_commext.testing.servers import LOOPBACK, VllmServer, free_port
from vllm_commext.testing.tiny_model import write_tiny_model

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

NUM_GPUS = torch.cuda.device_count()
BLOCK_SIZE = 16
PROMPT_BLOCKS = (1, 3, 8, 20, 60)
ENVIRON = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": LOOPBACK}

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, this machine has {NUM_GPUS}"),
    pytest.mark.timeout(900),
]


def gpu_server(name: str, role: str, gpus: str, tp: int, model: Path, folder: Path) -> VllmServer:
    """One engine on the given GPUs."""
    config: dict[str, Any] = {
        "kv_connector": "CommextNixlConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "side_channel_host": LOOPBACK,
            "side_channel_port": free_port(),
        },
    }
    return VllmServer(
        name,
        model,
        folder,
        tensor_parallel_size=tp,
        kv_transfer_config=config,
        args=[
            *("--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"),
            *("--gpu-memory-utilization", "0.1", "--max-num-seqs", "32"),
        ],
        environ={"CUDA_VISIBLE_DEVICES": gpus},
        base_environ=ENVIRON,
        ready_seconds=400,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(scope="module", params=[1, pytest.param(2, id="2-on-4-gpus")])
def engines(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    tp: int = request.param
    if 2 * tp > NUM_GPUS:
        pytest.skip(f"needs {2 * tp} GPUs, this machine has {NUM_GPUS}")
    folder = tmp_path_factory.mktemp("logs")
    gpus = [",".join(map(str, range(first, first + tp))) for first in (0, tp)]
    prefill = gpu_server("prefill", "kv_producer", gpus[0], tp, model, folder)
    decode = gpu_server("decode", "kv_consumer", gpus[1], tp, model, folder)
    try:
        for server in (prefill, decode):
            server.start()
        for server in (prefill, decode):
            server.wait_ready()
        yield prefill, decode
    finally:
        for server in (prefill, decode):
            server.stop()


def test_answers_are_the_prefill_engines_own(
    engines: tuple[VllmServer, VllmServer],
    model: Path,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    prefill, decode = engines
    numbers = random.Random(0)
    before = scrape(decode.url)
    num_blocks = 0
    for count in PROMPT_BLOCKS:
        prompt = [numbers.randrange(256) for _ in range(count * BLOCK_SIZE + 1)]
        got = disaggregated(prefill.url, decode.url, str(model), prompt, max_tokens=8)
        expected = complete(prefill.url, str(model), prompt, max_tokens=8)
        difference = compare(expected, got)
        assert difference.equal, difference
        num_blocks += count + 1
    moved = scrape(decode.url).minus(before)
    tp = decode.command[decode.command.index("--tensor-parallel-size") + 1]
    assert moved.total("vllm:commext_nixl_blocks_total") == num_blocks * int(tp)
    assert moved.total("vllm:commext_nixl_failures_total") == 0
    for name in ("bytes_total", "transfer_seconds_sum", "post_seconds_sum"):
        record_testsuite_property(name, moved.total(f"vllm:commext_nixl_{name}"))
