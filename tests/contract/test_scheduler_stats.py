"""What the scheduler side reports of itself: what its side channel refused, and its quarantine."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.contract.scheduler_engine import TO_PREFILL, request_of
from tests.kit.descriptions import description
from tests.kit.inquiry import ask
from tests.kit.load_states import begin_load
from tests.kit.ports import free_port
from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.engine_context import EngineContext
from vllm_commext.nixl.geometry.layout import (
    FULL,
    TOKENS,
    AttentionGeometry,
    CacheLayout,
    Family,
    Group,
)
from vllm_commext.nixl.metadata import HandshakeMetadata, WorkerMetadata
from vllm_commext.nixl.requests import FailedLoad
from vllm_commext.nixl.scheduler import SchedulerSide
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import open_description

HOST = "127.0.0.1"


def scheduler_side(port: int, tp_size: int = 1, pp_size: int = 1, **settings: Any) -> SchedulerSide:
    config = ConnectorConfig(side_channel_host=HOST, side_channel_port=port, **settings)
    groups = [Group(FULL, 16)]
    roles = {"produces": True, "consumes": True}
    return SchedulerSide(EngineContext("p", config, groups, tp_size, port, pp_size, **roles))


def test_rejects_of_the_side_channel_are_counted_once() -> None:
    port = free_port()
    side = scheduler_side(port)
    side.serve({})
    try:
        for _ in range(3):
            with pytest.raises(ProtocolError):
                ask(HOST, port, wire.DescribeRequest(engine_id="another", tp_rank=0))
        assert side.take_stats()["side_channel_rejects"] == 3
        assert side.take_stats() is None
    finally:
        side.close()


def test_blocks_in_quarantine_are_shown_until_they_are_given_back() -> None:
    side = scheduler_side(free_port())
    pool: Any = SimpleNamespace(touch=lambda blocks: None, free_blocks=lambda blocks: None)
    side.bind_block_pool(pool)

    def shown() -> float | None:
        stats = side.take_stats()
        return None if stats is None else stats["gauges"]["scheduler"]["quarantined_blocks"]

    assert shown() == 0
    begin_load(side, "r", blocks=(SimpleNamespace(), SimpleNamespace()))
    side.prompts.quarantine.note_late(["r"])
    assert shown() == 2
    assert shown() is None
    side.prompts.quarantine.note_settled({"r": 1})
    assert shown() == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_request_is_counted_once_whatever_the_number_of_ranks(num_ranks: int) -> None:
    """Through vLLM's own sum over the workers' outputs, which end in different steps."""
    side = scheduler_side(free_port(), tp_size=num_ranks)
    aggregator = KVOutputAggregator(num_ranks)

    def step(*outputs: KVConnectorOutput) -> None:
        ranks = [ModelRunnerOutput([], {}, kv_connector_output=one) for one in outputs]
        total = aggregator.aggregate(ranks).kv_connector_output
        if total is None:
            return
        received, sent = total.finished_recving or set(), total.finished_sending or set()
        side.note_outcomes(received, sent, total.kv_connector_worker_meta)

    for request_id, num_blocks in (("good", 3), ("bad", 5)):
        begin_load(side, request_id, num_missing=num_blocks, arrived=time.monotonic() - 3.0)
    for request_id in ("read", "late"):
        hold(side, request_id).held_since = time.monotonic() - 2.0
    assert gauge(side, "held_requests") == 2
    for rank in range(num_ranks):
        done = KVConnectorOutput(
            finished_sending={"read", "late"},
            finished_recving={"good", "bad"},
            kv_connector_worker_meta=WorkerMetadata(
                failed={"bad": FailedLoad("timeout" if rank == 0 else "transfer")}, expired={"late"}
            ),
        )
        idle = KVConnectorOutput()
        step(*(done if other == rank else idle for other in range(num_ranks)))
    stats = side.take_stats()
    assert stats["failures"] == {"timeout": 1}
    assert stats["blocks"] == 3
    (handover,) = stats["handover_seconds"]
    assert handover >= 3.0
    assert stats["expired_requests"] == 1
    assert len(stats["lease_age_seconds"]) == 2
    assert min(stats["lease_age_seconds"]) >= 2.0
    assert stats["gauges"]["scheduler"]["held_requests"] == 0
    assert stats["gauges"]["scheduler"]["streams"] == (side.engine.streaming.refusal is None)
    assert not side.prompts.quarantine.has_loads
    side.close()


def test_a_failure_on_one_rank_is_kept_until_the_last_one_is_done() -> None:
    side, aggregator = scheduler_side(free_port(), tp_size=2), KVOutputAggregator(2)

    def step(*ranks: KVConnectorOutput) -> list[tuple[str, bool]]:
        outputs = [ModelRunnerOutput([], {}, kv_connector_output=one) for one in ranks]
        total: Any = aggregator.aggregate(outputs).kv_connector_output
        side.note_outcomes(total.finished_recving or set(), set(), total.kv_connector_worker_meta)
        return side.prompts.take_unread()

    begin_load(side, "r")
    failed = KVConnectorOutput(
        finished_recving={"r"}, kv_connector_worker_meta=WorkerMetadata(unread={"r"})
    )
    assert step(failed, KVConnectorOutput()) == []
    assert step(KVConnectorOutput(), KVConnectorOutput(finished_recving={"r"})) == [("r", False)]
    assert step(KVConnectorOutput(), KVConnectorOutput()) == []
    side.close()


def hold(side: SchedulerSide, name: str) -> Any:
    """A prefill that is kept for its readers."""
    request = request_of(name, TO_PREFILL, [1, 2])
    side.note_arrival(request)
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_STOPPED, 2
    assert side.finish(request, ([1],))[0]
    return side._prefills._states[name]


def test_workers_of_all_stages_are_described_under_their_numbers() -> None:
    side = scheduler_side(free_port(), tp_size=2, pp_size=2)
    described = {
        (stage, rank): HandshakeMetadata(staged(stage, rank))
        for stage in range(2)
        for rank in range(2)
    }
    side.serve(described)
    assert side._server is not None
    layouts = {
        number: open_description(wire.decode_reply(answer)).layout
        for number, answer in side._server._answers.items()
    }
    side.close()
    assert sorted(layouts) == [0, 1, 2, 3]
    places = {number: (one.pp_rank, one.tp_rank) for number, one in layouts.items()}
    assert places == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert all(layout.worker == number for number, layout in layouts.items())


def staged(stage: int, rank: int) -> bytes:
    """What the worker of a stage with one layer says."""
    geometry = AttentionGeometry(
        *(8, 1, 64, 16, 2, False, 1, 32, 2, 2), content=TOKENS, dtype="uint8"
    )
    layout = CacheLayout(
        tp_size=2,
        tp_rank=rank,
        num_blocks=8,
        groups=[Group(FULL, 16)],
        families=[Family(0, [f"layer{stage}"], [4096], geometry)],
        pp_rank=stage,
        stages=[["layer0"], ["layer1"]],
    )
    return description("p", layout=layout)


def gauge(side: SchedulerSide, name: str) -> float:
    return side.take_stats()["gauges"]["scheduler"][name]
