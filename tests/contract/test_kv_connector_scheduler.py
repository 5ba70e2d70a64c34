"""The scheduler side with vLLM's own requests, cache manager and block pool."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.request import RequestStatus

from tests.contract.scheduler_engine import REMOTE_IDS, TO_PREFILL, Engine, request_of, to_decode
from vllm_commext.errors import ConfigError
from vllm_commext.nixl.metadata import StepMetadata, WorkerMetadata
from vllm_commext.nixl.prefill.fence import first_nonces
from vllm_commext.nixl.requests import FailedLoad, Hold

MakeEngine = Callable[..., Engine]
NUM_SLOTS = 64  # fewer than an engine has: all are to be taken twice


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
        "pp_size": 1,
        "transfer_mode": "pull",
    }
    assert engine.step().holds == [Hold("r", 60.0, 0, nonce)]
    assert engine.step() == StepMetadata()


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED])
def test_an_aborted_prefill_is_not_kept(make_engine: MakeEngine, status: RequestStatus) -> None:
    engine = make_engine("kv_producer")
    request = request_of("r", TO_PREFILL)
    engine.prefill(request)
    assert engine.finish(request, status) == (False, None)
    assert engine.step() == StepMetadata()


@pytest.mark.parametrize(
    ("role", "params"),
    [("kv_both", None), ("kv_both", {}), ("kv_producer", "decode"), ("kv_consumer", TO_PREFILL)],
)
def test_what_is_not_for_this_engine_is_left_alone(
    make_engine: MakeEngine, role: str, params: Any
) -> None:
    engine = make_engine(role)
    request = request_of("r", to_decode() if params == "decode" else params)
    assert engine.schedule(request)[1] == 0
    assert engine.finish(request, FINISHED[0]) == (False, None)
    assert engine.step() == StepMetadata()


@pytest.mark.parametrize("offered", [0, 3, 4, 6, 8])
def test_what_is_here_already_is_only_released(make_engine: MakeEngine, offered: int) -> None:
    engine = make_engine("kv_consumer")
    first = request_of("first", tokens=list(range(8)))
    engine.prefill(first)
    engine.manager.free(first)
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
    """The first reason of a request stays, and what all have read."""
    bad = {"x": FailedLoad("timeout", 32), "y": FailedLoad("request", 8)}
    first = WorkerMetadata(late={"a"}, settled={"b": 1}, failed={"x": bad["x"]}, expired={"e"})
    other = {**bad, "x": FailedLoad("transfer", 16)}
    more = WorkerMetadata(late={"a", "c"}, settled={"b": 1, "d": 1}, failed=other, expired={"f"})
    total = first.aggregate(more)
    ended = {"failed": {**bad, "x": FailedLoad("timeout", 16)}, "expired": {"e", "f"}}
    assert total == WorkerMetadata(late={"a", "c"}, settled={"b": 2, "d": 1}, **ended)


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
