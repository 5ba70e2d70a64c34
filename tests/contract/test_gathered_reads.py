"""A worker on vLLM's own caches that packs pieces for others, or only reads what they pack."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from tests.contract.scheduler_engine import TO_PREFILL, request_of
from tests.contract.vllm_caches import make_caches
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.vllm_cache import ModelFacts
from vllm_commext.nixl.wire.description import SLOTS, describe, open_description, tables_in
from vllm_commext.nixl.worker import WorkerSide


@pytest.mark.parametrize(
    ("is_on", "produces"), [(False, True), (True, False), (True, True)], ids=["off", "D", "P"]
)
def test_slots_are_offered_by_workers_that_are_read(is_on: bool, produces: bool) -> None:
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config, caches = make_caches({"layer": spec})
    settings = ConnectorConfig(
        "127.0.0.1", 5600, gathered_reads=is_on, gather_slots=3, gather_slot_bytes=1 << 20
    )
    model = ModelFacts(Rank(1, 0), 1, None, True, {"layer": "FLASH_ATTN"})
    worker = WorkerSide("e", settings, {}, config, model, produces=produces)
    worker.register(caches)
    try:
        description = open_description(describe(worker.handshake.description, "start"))
    finally:
        worker.close()
    offer = description.staging
    sizes = None if offer is None else (offer.num_slots, offer.slot_bytes)
    assert sizes == ((3, 1 << 20) if is_on and produces else None)
    assert (SLOTS in tables_in(description)) == is_on


@pytest.mark.parametrize("is_on", [False, True])
def test_workers_are_told_which_blocks_may_be_packed(
    make_engine: Callable[..., Any], is_on: bool
) -> None:
    engine = make_engine("kv_producer", gathered_reads=is_on)
    request = request_of("r", TO_PREFILL)
    engine.prefill(request)
    engine.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
    (hold,) = engine.step().holds
    assert list(hold.block_ids) == (engine.block_ids(request) if is_on else [])
