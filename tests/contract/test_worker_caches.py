"""A worker side on vLLM's own caches on a CPU: what it zeroes, and what it offers to be mapped."""

import logging

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from tests.contract.vllm_caches import make_caches
from vllm_commext.nixl.config import AUTO, NEVER, ConnectorConfig
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.requests import Load
from vllm_commext.nixl.vllm_cache import ModelFacts
from vllm_commext.nixl.wire.description import describe, open_description
from vllm_commext.nixl.worker import WorkerSide

BLOCK = 32
ATTENTION = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
STATE = MambaSpec(
    block_size=4096,
    shapes=((64, 3), (4, 8, 16)),
    dtypes=(torch.float32, torch.float32),
    mamba_type=MambaAttentionBackendEnum.MAMBA2,
    page_size_padded=ATTENTION.page_size_bytes,
)
CONFIG = ConnectorConfig(side_channel_host="127.0.0.1", side_channel_port=5600)


def zeroed_blocks(hybrid: bool, num_tokens: int, kernel_block_size: int) -> set[int]:
    """Blocks of the attention layer that a step has emptied which loads ``num_tokens`` tokens."""
    specs = {"attention": ATTENTION, **({"state": STATE} if hybrid else {})}
    config, caches = make_caches(specs, num_blocks=8, kernel_block_size=kernel_block_size)
    for cache in caches.values():
        torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage()).fill_(255)
    model = ModelFacts(Rank(1, 0), 4, 1, True, {"attention": "FLASH_ATTN"})
    worker = WorkerSide("d", CONFIG, {}, config, model)
    blocks = [Blocks(0, [5, 2, 7]), Blocks(0, [3])]
    names = [group.layer_names[0] for group in config.kv_cache_groups]
    by_group = tuple(blocks[name == "state"] for name in names)
    load = Load("r", None, by_group, num_tokens, refusal="only what comes before the read counts")
    worker.register(caches)
    try:
        worker.start_step(StepMetadata(loads=[load]))
    finally:
        worker.close()
    whole = caches["attention"].reshape(8, -1).view(torch.uint8)
    found = {block for block in range(8) if not whole[block].any()}
    assert all(bool((whole[block] == 255).all()) for block in set(range(8)) - found)
    return found


@pytest.mark.parametrize("kernel_block_size", [0, 16])
@pytest.mark.parametrize(("num_tokens", "expected"), [(65, {7}), (95, {7}), (96, set[int]())])
def test_only_a_last_block_that_is_not_filled_is_emptied(
    num_tokens: int, expected: set[int], kernel_block_size: int
) -> None:
    assert zeroed_blocks(True, num_tokens, kernel_block_size) == expected


def test_blocks_of_a_model_without_states_are_left_as_they_are() -> None:
    assert zeroed_blocks(False, 65, 0) == set()


@pytest.mark.parametrize("wanted", [AUTO, NEVER])
def test_a_worker_on_cpus_offers_nothing(log_lines: pytest.LogCaptureFixture, wanted: str) -> None:
    config, caches = make_caches({"attention": ATTENTION})
    settings = ConnectorConfig("127.0.0.1", 5600, mapped_reads=wanted)
    model = ModelFacts(Rank(1, 0), 4, None, True, {"attention": "FLASH_ATTN"})
    worker = WorkerSide("d", settings, {}, config, model)
    worker.register(caches)
    try:
        reply = describe(worker.handshake.description, "start")
        assert open_description(reply).mapped is None
    finally:
        worker.close()
    said = [one for one in log_lines.records if one.levelno >= logging.INFO]
    assert not [one for one in said if "mapped_reads" in one.getMessage()]
