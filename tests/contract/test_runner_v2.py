"""vLLM's second model runner around our worker side: with a draft model it asks for a step's
results before it has the step saved. A failed load must still be told, a copy still be whole."""

import inspect
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.contract.vllm_caches import make_caches
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.connector import CommextNixlConnector
from vllm_commext.nixl.geometry.topology import Rank
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.requests import Blocks, Load
from vllm_commext.nixl.vllm_cache import ModelFacts
from vllm_commext.nixl.worker import WorkerSide

runner = pytest.importorskip("vllm.v1.worker.gpu.kv_connector", reason="of newer vLLM")
BOUND_SECONDS = 60.0
PROMPT, DRAFT = 1.0, 2.0
DEFERS = "defer_finalize" in inspect.signature(runner.ActiveKVConnector.post_forward).parameters


class Worker:
    """A worker side that keeps a copy on the host, and vLLM's runner around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config, self.caches = make_caches({"layer": spec})
        facts = ModelFacts(Rank(1, 0), 1, None, True, {"layer": "FLASH_ATTN"})
        settings = ConnectorConfig(side_channel_host="127.0.0.1", side_channel_port=5600)
        self.side = WorkerSide("d", settings, {}, config, facts, keeps_host_copy=True)
        connector: Any = CommextNixlConnector.__new__(CommextNixlConnector)
        connector._worker_side, connector._scheduler_side = self.side, None
        connector._connector_metadata = None
        monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: connector)
        self.active = runner.ActiveKVConnector(VllmConfig(), self.caches)

    def step(self, told: StepMetadata, *, draft: bool) -> Any:
        """A step as the runner takes it; a draft writes after the model has."""
        self.active.pre_forward(
            SimpleNamespace(kv_connector_metadata=told, has_sync_kv_loads=False)
        )
        self.caches["layer"].fill_(PROMPT)
        if not (draft and DEFERS):
            return self.active.post_forward(set())
        output = self.active.post_forward(set(), defer_finalize=True)
        self.caches["layer"].fill_(DRAFT)
        self.active.finalize_step()
        return output


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(monkeypatch)
    yield made
    made.side.close()


@pytest.mark.parametrize("draft", [False, True])
def test_the_copy_has_what_the_step_ended_with(worker: Worker, draft: bool) -> None:
    worker.step(StepMetadata(saves=[((1, 2),)]), draft=draft)
    host: Any = worker.side._host
    saved, rest = host.views["layer"][1:3], host.views["layer"][3:]
    assert torch.equal(saved, worker.caches["layer"][1:3])
    assert saved.mean().item() == (DRAFT if draft and DEFERS else PROMPT)
    assert not torch.equal(rest, worker.caches["layer"][3:])


@pytest.mark.parametrize("draft", [False, True])
def test_a_failed_load_is_told_once_and_to_the_scheduler_too(worker: Worker, draft: bool) -> None:
    loads = [
        Load(
            name, None, (Blocks(0, [1]),), 16, refusal="not to be tried", recomputes=name == "said"
        )
        for name in ("said", "unsaid")
    ]
    told, received, failed, unread = StepMetadata(loads=loads), [], [], []
    deadline = time.monotonic() + BOUND_SECONDS
    while len(received) < len(loads) and time.monotonic() < deadline:
        output = worker.step(told, draft=draft)
        told = StepMetadata()
        received += output.finished_recving or ()
        failed += output.failed_recving or ()
        meta = output.kv_connector_worker_meta
        unread += meta.unread if meta is not None else ()
    assert (sorted(received), failed, unread) == (["said", "unsaid"], ["unsaid"], ["said"])
