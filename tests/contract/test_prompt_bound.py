"""Request parameters and prompts: the KV cache of one prompt is never taken for another's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request, RequestStatus

from tests.contract.scheduler_engine import TO_PREFILL, Engine, request_of, to_decode
from tests.kit.tiny_lora import write_named
from vllm_commext.nixl.metadata import StepMetadata

MakeEngine = Callable[..., Engine]
PROMPT = list(range(14))
FINISHED = RequestStatus.FINISHED_LENGTH_CAPPED


def image(name: str, offset: int = 2) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset, 3)
    )


class Adapter(LoRARequest):
    """The request of an adapter whose files are written when it is loaded."""

    content: str = ""


@pytest.fixture(autouse=True)
def _adapters_are_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def adapter(name: str, content: str = "content", path: str = "") -> Adapter:
    path = path or f"{name} {content}"
    return Adapter(lora_name=name, lora_int_id=1, lora_path=path, content=content)


def loaded(engine: Engine, request: Request) -> Request:
    """A request, once the engine's workers have loaded its adapter in the last one's place."""
    lora = request.lora_request
    if isinstance(lora, Adapter):
        write_named(Path(lora.lora_path), lora.content)
        lora.load_inplace = True
        engine.connector.scheduler_side.begin_adapter(lora)()
        lora.load_inplace = False  # as vLLM does
    return request


def prefilled(engine: Engine, request: Request) -> dict[str, Any]:
    """What the prefill engine returns for a request."""
    engine.prefill(loaded(engine, request))
    kept, params = engine.finish(request, FINISHED)
    assert kept
    assert params is not None
    return params


def refusal(engine: Engine, request: Request) -> str:
    """Why the decode engine does not use the request's parameters, "" where it does."""
    engine.schedule(loaded(engine, request))
    (load,) = engine.step().loads
    is_used, is_released = not load.refusal, load.refusal.endswith(BY_OTHERS)
    assert (load.remote is not None) == (is_used or is_released)
    assert not (load.awaited and is_released)
    engine.manager.free(request)
    return load.refusal


BY_OTHERS = "Load the same adapters and weights on both engines."
"""What was computed by others is released: the blocks are those of the prompt."""


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another token": ({}, {"tokens": [*PROMPT[:-1], 99]}, "token ids"),
    "a shorter prompt": ({}, {"tokens": PROMPT[:-1]}, "computed 14 tokens"),
    "a salt of P's alone": ({"cache_salt": "x"}, {}, "cache_salt"),
    "an adapter of the same name": (
        {"lora_request": adapter("a")},
        {"lora_request": adapter("a", "another")},
        "LoRA adapter",
    ),
    "another image": (
        {"mm_features": [image("one")]},
        {"mm_features": [image("two")]},
        "multimodal items",
    ),
    "embeddings for tokens": ({}, {"prompt_embeds": torch.ones(14, 4)}, "prompt embeddings"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_parameters_of_another_prompt_are_refused_with_what_differs(
    make_engine: MakeEngine, case: str
) -> None:
    computed, asked, words = OTHERS[case]
    prefill, decode = make_engine("kv_producer"), make_engine("kv_consumer")
    params = prefilled(prefill, request_of("there", TO_PREFILL, **computed))
    said = refusal(decode, request_of("here", params, **asked))
    assert "another prompt" in said
    assert words in said
    assert "prefill engine 'e'" in said
    # The right request can still use them.
    assert refusal(decode, request_of("right", params, **computed)) == ""


@pytest.mark.parametrize("hybrid", [False, True])
def test_equal_inputs_are_equal_whatever_their_engines_call_them(
    make_engine: MakeEngine, hybrid: bool
) -> None:
    prefill = make_engine("kv_producer", hybrid=hybrid)
    decode = make_engine("kv_consumer", hybrid=hybrid)
    inputs = {"mm_features": [image("one"), image("two", 7)], "cache_salt": "salt"}
    there = request_of("there", TO_PREFILL, lora_request=adapter("a"), **inputs)
    params = prefilled(prefill, there)
    assert params["remote_num_tokens"] == (13 if hybrid else 14)
    here = request_of("here", params, lora_request=adapter("a", path="elsewhere"), **inputs)
    assert refusal(decode, here) == ""


def test_tokens_generated_by_the_prefill_engine_are_not_offered(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine("kv_producer"), make_engine("kv_consumer")
    request = request_of("there", TO_PREFILL)
    prefill.prefill(request)
    request.append_output_token_ids([5, 6, 7, 8])
    prefill.manager.allocate_slots(request, 4)
    request.num_computed_tokens = 18
    _, params = prefill.finish(request, FINISHED)
    assert params["remote_num_tokens"] == 14
    assert params["remote_block_ids"] == [prefill.block_ids(request)[:4]]
    assert refusal(decode, request_of("here", params)) == ""


def test_a_request_for_the_prompts_logprobs_computes_the_prompt_and_releases(
    make_engine: MakeEngine,
) -> None:
    decode = make_engine("kv_consumer")
    request = request_of("r", to_decode())
    request.skip_reading_prefix_cache = True  # what vLLM sets where prompt_logprobs are asked for
    assert decode.schedule(request)[1] == 0
    (load,) = decode.step().loads
    assert (load.awaited, load.refusal) == (False, "")


OF_VLLMS_CONNECTOR = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "in-tree",
    "remote_request_id": "there",
    "remote_host": "10.9.8.7",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 14,
    "remote_blocks_expiry_time": 1.0,
    "transfer_mode": "pull",
}


def test_parameters_of_another_connector_go_no_further(make_engine: MakeEngine) -> None:
    """No heartbeat, no handshake, no release: a frame of ours ends the listener of vLLM's."""
    decode = make_engine("kv_consumer")
    request = request_of("r", OF_VLLMS_CONNECTOR)
    decode.connector.on_new_request(request)
    assert decode.step() == StepMetadata()
    decode.schedule(request)
    (load,) = decode.step().loads
    assert load.remote is None
    assert load.awaited
    assert "no field of CommextNixlConnector" in load.refusal
    unscheduled = request_of("other", OF_VLLMS_CONNECTOR)
    decode.connector.on_new_request(unscheduled)
    unscheduled.status = RequestStatus.FINISHED_ABORTED
    decode.connector.request_finished(unscheduled, [])
    assert decode.step() == StepMetadata()
