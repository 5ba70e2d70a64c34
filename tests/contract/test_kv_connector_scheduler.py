"""The scheduler side with vLLM's own requests, cache manager and block pool."""

import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.request import RequestStatus

from tests.contract.scheduler_engine import (
    BLOCK,
    REMOTE_IDS,
    TO_PREFILL,
    Engine,
    request_of,
    to_decode,
)
from vllm_commext.errors import ConfigError
from vllm_commext.nixl.metadata import StepMetadata, WorkerMetadata
from vllm_commext.nixl.prefill.fence import KEY_BYTES, FenceSlots, first_nonces
from vllm_commext.nixl.requests import Hold

MakeEngine = Callable[..., Engine]
NUM_SLOTS = 64  # fewer than an engine has: all are to be taken twice


def warm(engine: Engine, num_tokens: int) -> None:
    """Leave the first ``num_tokens`` of the prompt in the prefix cache."""
    request = request_of("warm", tokens=list(range(num_tokens)))
    engine.prefill(request)
    engine.manager.free(request)


FINISHED = [RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED]


@pytest.mark.parametrize("status", FINISHED)
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_a_prefilled_request_is_kept_and_described(
    make_engine: MakeEngine, role: str, status: RequestStatus
) -> None:
    engine = make_engine(role)
    request = request_of("r", TO_PREFILL)
    engine.prefill(request)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    kept, params = engine.finish(request, status)
    assert kept
    nonce = int(first_nonces(engine.fence_key)[0])
    assert params is not None
    assert abs(params.pop("remote_computed_at") - time.time_ns() // 1_000_000) < 60_000
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 7000,
        "remote_block_ids": [engine.block_ids(request)],
        "remote_num_tokens": 14,
        "remote_protocol": 4,
        "remote_prompt": {"tokens": hashlib.sha256(b"\x9e" + bytes(range(14))).hexdigest()},
        "remote_seal": "",
        "remote_incarnation": engine.connector.scheduler_side.engine.incarnation,
        "remote_fence_slot": 0,
        "remote_fence_nonce": f"{nonce:016x}",
        "tp_size": 1,
        "transfer_mode": "pull",
    }
    assert engine.step().holds == [Hold("r", 60.0, 0, nonce)]
    assert engine.step() == StepMetadata()


def test_no_two_prefills_get_the_same_fence_in_this_start_or_another(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(FenceSlots, num_slots=NUM_SLOTS)
    monkeypatch.setattr("vllm_commext.nixl.prefill.prefills.FenceSlots", few)
    engine, later = make_engine("kv_producer"), make_engine("kv_producer")
    assert len(engine.fence_key) == KEY_BYTES
    assert engine.fence_key != later.fence_key
    seen: list[tuple[int, str]] = []
    for number in range(2 * NUM_SLOTS + 1):
        request = request_of(f"r{number}", TO_PREFILL, [1, 2])
        request.status = FINISHED[0]
        request.num_computed_tokens = 2
        engine.connector.on_new_request(request)
        kept, params = engine.connector.request_finished(request, [1])
        assert kept
        seen.append((params["remote_fence_slot"], params["remote_fence_nonce"]))
        engine.report(finished_sending={request.request_id})
    assert [slot for slot, _ in seen] == [*range(NUM_SLOTS), *range(NUM_SLOTS), 0]
    assert len({nonce for _, nonce in seen}) == len(seen)


def test_only_blocks_with_computed_tokens_are_offered(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_producer")
    request = request_of("r", TO_PREFILL)
    engine.prefill(request)
    engine.manager.allocate_slots(request, 8)
    assert len(engine.block_ids(request)) == 6
    _, params = engine.finish(request, FINISHED[0])
    assert params["remote_block_ids"] == [engine.block_ids(request)[:4]]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED])
def test_an_aborted_prefill_is_not_kept(make_engine: MakeEngine, status: RequestStatus) -> None:
    engine = make_engine("kv_producer")
    request = request_of("r", TO_PREFILL)
    engine.prefill(request)
    assert engine.finish(request, status) == (False, None)
    assert engine.step() == StepMetadata()


def test_an_ordinary_request_is_left_alone(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_both")
    for number, params in enumerate([None, {}]):
        request = request_of(f"r{number}", params)
        assert engine.schedule(request)[1] == 0
        assert engine.finish(request, FINISHED[0]) == (False, None)
    assert engine.step() == StepMetadata()


@pytest.mark.parametrize("num_warm", [0, 4, 8, 12])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_the_missing_blocks_are_loaded(make_engine: MakeEngine, role: str, num_warm: int) -> None:
    engine = make_engine(role)
    if num_warm:
        warm(engine, num_warm)
    request = request_of("r", to_decode())
    assert engine.schedule(request) == (num_warm, 14 - num_warm)
    (load,) = engine.step().loads
    assert load.awaited
    assert (load.request_id, load.refusal) == ("r", "")
    (blocks,) = load.blocks
    assert blocks.first == num_warm // BLOCK
    assert load.block_ids == engine.block_ids(request)[blocks.first :]
    assert load.num_tokens == 14
    assert load.remote.block_ids == (tuple(REMOTE_IDS[0]),)
    assert load.remote.request_id == "there"
    assert (load.remote.fence_slot, load.remote.fence_nonce) == (7, 255)
    assert engine.step() == StepMetadata()
    assert engine.finish(request, FINISHED[0]) == (False, None)
    assert engine.step() == StepMetadata()


@pytest.mark.parametrize("offered", [0, 3, 4, 6, 8])
def test_what_is_here_already_is_only_released(make_engine: MakeEngine, offered: int) -> None:
    engine = make_engine("kv_consumer")
    warm(engine, 8)
    request = request_of("r", to_decode(offered))
    assert engine.schedule(request) == (8, 0)
    (load,) = engine.step().loads
    assert (load.awaited, load.block_ids, load.refusal) == (False, [], "")


def test_blocks_are_kept_from_the_arrival_until_the_load(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer")
    engine.connector.on_new_request(request_of("early", to_decode()))
    (wait,) = engine.step().waits
    assert (wait.request_id, wait.remote.request_id) == ("early", "there")
    engine.schedule(request_of("quick", to_decode()))
    step = engine.step()
    assert [load.request_id for load in step.loads] == ["quick"]
    assert step.waits == []
    engine.connector.on_new_request(request_of("bad", {"do_remote_prefill": True}))
    assert engine.step() == StepMetadata()


def test_an_abort_before_scheduling_releases_only(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer")
    request = request_of("r", to_decode())
    engine.connector.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert engine.connector.request_finished(request, []) == (False, None)
    (load,) = engine.step().loads
    assert (load.awaited, load.block_ids) == (False, [])
    assert load.remote.request_id == "there"


def test_an_abort_during_the_load_adds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer")
    request = request_of("r", to_decode())
    engine.schedule(request)
    assert len(engine.step().loads) == 1
    assert engine.finish(request, RequestStatus.FINISHED_ABORTED) == (False, None)
    assert engine.step() == StepMetadata()


@pytest.mark.parametrize("num_warm", [0, 8])
@pytest.mark.parametrize(
    ("change", "word"),
    [({"remote_port": None}, "remote_port"), ({"remote_block_ids": None}, "remote_block_ids")],
)
def test_bad_parameters_become_a_load_that_fails(
    make_engine: MakeEngine, change: dict[str, Any], word: str, num_warm: int
) -> None:
    engine = make_engine("kv_consumer")
    if num_warm:
        warm(engine, num_warm)
    request = request_of("r", to_decode(**change))
    assert engine.schedule(request) == (num_warm, 14 - num_warm)
    (load,) = engine.step().loads
    assert load.awaited
    assert load.remote is None
    assert word in load.refusal
    assert load.block_ids == engine.block_ids(request)[num_warm // BLOCK :]


def test_an_abort_with_bad_parameters_asks_for_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer")
    request = request_of("r", to_decode(remote_port=None))
    engine.connector.on_new_request(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert engine.connector.request_finished(request, []) == (False, None)
    assert engine.step() == StepMetadata()


def test_a_producer_does_not_load(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_producer")
    request = request_of("r", to_decode())
    assert engine.schedule(request) == (0, 0)
    assert engine.finish(request, FINISHED[0]) == (False, None)
    assert engine.step() == StepMetadata()


def test_a_consumer_does_not_keep(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer")
    request = request_of("r", TO_PREFILL)
    engine.prefill(request)
    assert engine.finish(request, FINISHED[0]) == (False, None)
    assert engine.step() == StepMetadata()


def test_late_blocks_stay_out_of_the_real_pool_until_settled(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer")
    warm(engine, 8)
    num_free = engine.num_free
    request = request_of("r", to_decode())
    engine.schedule(request)
    blocks = list(engine.manager.get_blocks("r").blocks[0])
    engine.step()
    engine.report(kv_connector_worker_meta=WorkerMetadata(late={"r"}))
    assert engine.step().given_up == ["r"]
    assert engine.step() == StepMetadata()
    engine.report(finished_recving={"r"})
    engine.manager.free(request)
    assert [block.ref_cnt for block in blocks] == [1] * len(blocks)
    assert engine.num_free == num_free - len(blocks)
    pool = engine.manager.block_pool
    others = pool.get_new_blocks(engine.num_free)
    assert not set(map(id, others)) & set(map(id, blocks))
    pool.free_blocks(others)
    engine.report(kv_connector_worker_meta=WorkerMetadata(settled={"r": 1}))
    assert [block.ref_cnt for block in blocks] == [0] * len(blocks)
    assert engine.num_free == num_free


def test_a_load_that_ended_in_the_same_step_is_not_given_up(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer")
    num_free = engine.num_free
    request = request_of("r", to_decode())
    engine.schedule(request)
    engine.step()
    late = WorkerMetadata(late={"r"}, settled={})
    engine.report(finished_recving={"r"}, kv_connector_worker_meta=late)
    assert engine.step() == StepMetadata()
    engine.manager.free(request)
    assert engine.num_free == num_free


def test_metadata_of_two_workers_adds_up() -> None:
    first = WorkerMetadata(late={"a"}, settled={"b": 1})
    total = first.aggregate(WorkerMetadata(late={"a", "c"}, settled={"b": 1, "d": 1}))
    assert total == WorkerMetadata(late={"a", "c"}, settled={"b": 2, "d": 1})


def test_a_state_is_handed_over_one_token_early(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("kv_producer", hybrid=True), make_engine("kv_both", hybrid=True)
    first = request_of("there", TO_PREFILL)
    prefill.prefill(first)
    assert (first.num_prompt_tokens, first.num_tokens, first.max_tokens) == (13, 13, 1)
    assert first.prompt_token_ids == list(range(13))
    _, params = prefill.finish(first, FINISHED[0])
    assert params["remote_num_tokens"] == 13
    attention, state = prefill.manager.get_block_ids("there")
    assert params["remote_block_ids"] == [list(attention), list(state)]
    request = request_of("here", params)
    assert decode.schedule(request) == (0, 13)
    (load,) = decode.step().loads
    own = decode.manager.get_block_ids("here")
    assert load.num_tokens == 13
    assert [(blocks.first, blocks.block_ids) for blocks in load.blocks] == [
        (0, list(own[0])),
        (0, list(own[1])),
    ]


@pytest.mark.parametrize("tokens", [[1], list(range(14))])
def test_a_prompt_that_cannot_be_cut_is_not_offered(
    make_engine: MakeEngine, tokens: list[int]
) -> None:
    engine = make_engine("kv_producer", hybrid=True)
    request = request_of("r", TO_PREFILL, tokens)
    if len(tokens) > 1:
        request.sampling_params.prompt_logprobs = 1
    engine.prefill(request)
    assert request.num_prompt_tokens == len(tokens)
    assert engine.finish(request, FINISHED[0]) == (False, None)


def test_a_state_after_too_many_tokens_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_consumer", hybrid=True)
    params = to_decode(remote_block_ids=[REMOTE_IDS[0], [9]])
    request = request_of("r", params)
    assert engine.schedule(request) == (0, 13)
    (load,) = engine.step().loads
    assert "at most 13 of 14" in load.refusal


def test_another_connectors_description_of_the_workers_stops_the_start(
    make_engine: MakeEngine,
) -> None:
    """Under vLLM's MultiConnector."""
    engine = make_engine("kv_producer")
    other = type("OtherMetadata", (KVConnectorHandshakeMetadata,), {})()
    with pytest.raises(ConfigError) as raised:
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): other})
    message = str(raised.value)
    assert "got ['OtherMetadata']" in message
    assert "name CommextNixlConnector before it" in message
