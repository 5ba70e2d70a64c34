"""A worker on vLLM's own caches that is to map others' memory and has none that can be mapped."""

import logging

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.contract.vllm_caches import make_caches
from vllm_commext.nixl.config import AUTO, NEVER, ConnectorConfig
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.vllm_cache import ModelFacts
from vllm_commext.nixl.wire.description import describe, open_description
from vllm_commext.nixl.worker import WorkerSide


@pytest.mark.parametrize("wanted", [AUTO, NEVER])
def test_a_worker_on_cpus_offers_nothing(log_lines: pytest.LogCaptureFixture, wanted: str) -> None:
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config, caches = make_caches({"layer": spec})
    settings = ConnectorConfig("127.0.0.1", 5600, mapped_reads=wanted)
    model = ModelFacts(Rank(1, 0), 1, None, True, {"layer": "FLASH_ATTN"})
    worker = WorkerSide("d", settings, {}, config, model)
    worker.register(caches)
    try:
        reply = describe(worker.handshake.description, "start")
        assert open_description(reply).mapped is None
    finally:
        worker.close()
    said = [one for one in log_lines.records if one.levelno >= logging.INFO]
    assert not [one for one in said if "mapped_reads" in one.getMessage()]
