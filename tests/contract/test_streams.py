"""Chunk streaming in vLLM's own scheduler: what a prefill engine tells of a prompt step by step,
and how a decode engine waits for one, without any blocks, until it has begun."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.contract.arrivals import HOST, PROMPT, TO_STREAM, WHOLE, Channel, MakeCore
from tests.contract.scheduled_core import (
    BLOCK,
    Core,
    Worker,
    free,
    has_ended,
    next_token,
    request_of,
    turn_until,
)
from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.requests import Hold
from vllm_commext.nixl.wire.params import write_place

SECRET = b"0123456789abcdef"


def blocks_in(told: Worker) -> list[int]:
    """The prompt's blocks, as they were told."""
    found: list[int] = []
    for chunk in told.chunks:
        for place, block_ids in chunk.listed:
            assert place == len(found)
            found += block_ids
    return found


def params_of(core: Core, name: str) -> Any:
    (output,) = [one for one in core.outputs if one.request_id == name and one.finish_reason]
    return output.kv_transfer_params


def test_each_step_of_a_prompt_is_told_with_its_blocks(make_core: MakeCore, is_async: bool) -> None:
    core = make_core("kv_producer", is_async=is_async)
    told = core.worker
    core.add(request_of("warm", PROMPT[:10], max_tokens=1))
    core.run("warm")
    core.add(request_of("p", PROMPT, TO_STREAM, max_tokens=1))
    core.run("p")
    params = params_of(core, "p")
    assert [chunk.num_tokens for chunk in told.chunks] == [24, 40]
    assert [chunk.begins for chunk in told.chunks] == [True, False]
    assert blocks_in(told) == params["remote_block_ids"][0]
    assert params["remote_chunk_tokens"] == 16
    nonce = int(params["remote_fence_nonce"], 16)
    assert {(chunk.row, chunk.nonce) for chunk in told.chunks} == {(told.chunks[0].row, nonce)}
    core.turn()
    hold = Hold("p", 60.0, params["remote_fence_slot"], nonce, told.chunks[0].row)
    assert told.holds == [hold]


def test_a_preempted_prompt_is_told_anew(make_core: MakeCore, is_async: bool) -> None:
    core = make_core("kv_producer", is_async=is_async, num_blocks=14)
    told = core.worker
    # Both are let in, and the last block that the prompt needs has gone to the other by then.
    other = [100 + token for token in range(11)]
    core.add(request_of("other", other, max_tokens=30))
    core.add(request_of("p", PROMPT, TO_STREAM, max_tokens=1))
    core.run("other", "p")
    params = params_of(core, "p")
    assert told.restarts
    assert all(one.slot == params["remote_fence_slot"] for one in told.restarts)
    nonces = [one.nonce for one in told.restarts]
    assert len({*nonces, int(params["remote_fence_nonce"], 16)}) == len(nonces) + 1
    assert {chunk.nonce for chunk in told.chunks} == {int(params["remote_fence_nonce"], 16)}
    assert blocks_in(told) == params["remote_block_ids"][0]
    assert told.chunks[-1].num_tokens == len(PROMPT)


def test_an_aborted_prompt_keeps_its_blocks_until_its_readers_are_told(make_core: MakeCore) -> None:
    core = make_core("kv_producer")
    told = core.worker
    before = free(core)
    core.add(request_of("p", PROMPT, TO_STREAM, max_tokens=1))
    core.turn()
    (chunk,) = told.chunks
    core.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    assert free(core) < before
    core.turn()
    assert [(one.lease_seconds, one.stream_row) for one in told.holds] == [(0.0, chunk.row)]
    core.turn()
    assert free(core) == before


def test_fences_agree_after_a_prompt_was_preempted_and_aborted_between_two_steps(
    make_core: MakeCore,
) -> None:
    core = make_core("kv_producer")
    side = core.scheduler.get_kv_connector().scheduler_side  # pyright: ignore
    fences = FenceTable()
    fences.arm(side.engine.fence_key)
    told = core.worker
    before = free(core)
    core.add(request_of("p", PROMPT, TO_STREAM, max_tokens=1))
    core.turn()
    core.scheduler.reset_prefix_cache(reset_running_requests=True)
    core.scheduler.finish_requests("p", RequestStatus.FINISHED_ABORTED)
    core.turn()
    (restart,), (hold,) = told.restarts, told.holds
    fences.end(restart.slot, restart.nonce)  # as workers do, in this order
    fences.end(hold.fence_slot, hold.fence_nonce)
    turn_until(core, lambda: not core.scheduler.requests)
    assert free(core) == before
    assert int(fences.nonces[hold.fence_slot]) == int(
        side._prefills._fences._nonces[hold.fence_slot]
    )


def test_a_request_waits_without_blocks_and_without_steps_until_its_prompt_has_begun(
    make_core: MakeCore, channel: Channel, is_async: bool
) -> None:
    core = make_core("kv_consumer", is_async=is_async)
    before = free(core)
    core.add(request_of("d", PROMPT, channel.params, max_tokens=3))
    begun, num_steps = time.monotonic(), core._num_steps
    while time.monotonic() < begun + 0.5:
        core.turn()
    assert core._num_steps - num_steps < 200
    assert free(core) == before
    assert core.worker.loads == []
    core.worker.holds_loads = True
    channel.begin(PROMPT)
    turn_until(core, lambda: bool(core.worker.loads))
    (load,) = core.worker.loads
    assert (load.remote.stream_row, load.remote.stream_tag, load.remote.fence_nonce) == (3, 77, 77)
    assert load.num_tokens == len(PROMPT)
    assert len(load.block_ids) == len(PROMPT) // BLOCK
    core.worker.holds_loads = False
    turn_until(core, lambda: has_ended(core, "d"))
    assert core.answer("d").tokens == WHOLE[:3]
    assert core.worker.computed["d"][0] == len(PROMPT) - 1


def test_an_engine_does_not_sleep_over_a_request_that_waits_for_its_grammar(
    make_core: MakeCore, channel: Channel
) -> None:
    """Nobody notifies when a grammar is there: only until the answer does the engine sleep."""
    core = make_core("kv_consumer")
    side = core.scheduler.get_kv_connector().scheduler_side  # pyright: ignore
    choice = StructuredOutputsParams(choice=["a"])
    request = request_of("d", PROMPT, channel.params, max_tokens=3, structured_outputs=choice)
    request.structured_output_request._grammar = Future()
    core.add(request)
    assert side.is_loading("d")
    channel.begin(PROMPT)
    turn_until(core, lambda: side.prompts._asker.answer("d") is not None)
    side.engine.wakeup.wait = lambda arrivals: pytest.fail("it sleeps")
    for _ in range(10):
        core.turn()
    core.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize(
    ("begin", "settings", "words"),
    [
        (lambda channel: channel.begin(PROMPT, refusal="said no"), {}, "said no"),
        (lambda channel: channel.begin(PROMPT, row=-1), {}, ""),
        (lambda channel: channel.begin(PROMPT, fence_slot=-1), {}, ""),
        (lambda channel: channel.begin(PROMPT, num_tokens=0), {}, ""),
        (lambda channel: channel.close(), {}, ""),
        (lambda _: None, {"stream_begin_timeout": 0.2}, "stream_begin_timeout"),
        (lambda _: None, {"stream_chunks": False}, "stream_chunks"),
    ],
    ids=["refused", "no row", "no fence", "no tokens", "gone", "too late", "streams nothing"],
)
def test_what_a_request_is_told_in_vain_fails_it(
    make_core: MakeCore,
    channel: Channel,
    begin: Callable[[Channel], None],
    settings: dict[str, Any],
    words: str,
) -> None:
    core = make_core("kv_consumer", **settings)
    core.worker.fails = lambda request_id: True
    before = free(core)
    begin(channel)
    core.add(request_of("d", PROMPT, channel.params, max_tokens=3))
    turn_until(core, lambda: has_ended(core, "d"))
    assert core.answer("d").finish_reason == FinishReason.ERROR
    (load,) = core.worker.told
    assert load.remote is None
    assert words in load.refusal
    turn_until(core, lambda: free(core) == before)


@pytest.mark.parametrize("other", [[1, *PROMPT[1:]], [*PROMPT, 5]], ids=["as long", "longer"])
def test_a_stream_of_another_prompt_is_not_read(
    make_core: MakeCore, channel: Channel, other: list[int]
) -> None:
    core = make_core("kv_consumer")
    channel.begin(other)
    core.add(request_of("d", PROMPT, channel.params, max_tokens=3))
    turn_until(core, lambda: has_ended(core, "d"))
    assert core.answer("d").tokens[0] == next_token(PROMPT)
    assert core.worker.computed["d"][: len(PROMPT)] == list(range(len(PROMPT)))
    assert core.failures == {"request": 1}


def test_with_a_secret_no_place_is_asked_that_it_does_not_prove(
    make_core: MakeCore, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    channel = Channel(SECRET)
    with closing(channel), socket.create_server((HOST, 0)) as elsewhere:
        elsewhere.setblocking(False)
        prefill = make_core("kv_producer", side_channel_secret_file=str(file))
        prefill.add(request_of("p", PROMPT, TO_STREAM, max_tokens=1))
        prefill.run("p")
        told = params_of(prefill, "p")
        place = write_place(told["remote_host"], told["remote_port"], SECRET)
        assert told["remote_place_seal"] == place["seal"] != ""

        core = make_core("kv_consumer", side_channel_secret_file=str(file))
        core.worker.fails = lambda request_id: request_id != "proven"
        loads = core.worker.told
        forged = {**channel.params, "remote_port": elsewhere.getsockname()[1]}
        for name, params in {
            "forged": forged,
            "none": {**channel.params, "remote_place_seal": None},
            "another's": {**forged, "remote_place_seal": write_place(HOST, 1, SECRET)["seal"]},
        }.items():
            core.add(request_of(name, PROMPT, params, max_tokens=3))
            turn_until(core, partial(has_ended, core, name))
            assert "expected remote_place_seal to prove" in loads[-1].refusal
        with pytest.raises(BlockingIOError):
            elsewhere.accept()

        channel.begin(PROMPT)
        core.add(request_of("proven", PROMPT, channel.params, max_tokens=3))
        turn_until(core, lambda: has_ended(core, "proven"))
        assert (loads[-1].refusal, loads[-1].remote.stream_row) == ("", 3)
