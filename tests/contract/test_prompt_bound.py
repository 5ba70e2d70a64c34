"""Request parameters and prompts: the KV cache of one prompt is never taken for another's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request, RequestStatus

from tests.contract.scheduler_engine import TO_PREFILL, Engine, request_of, to_decode
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.prefill import prefills
from vllm_commext.nixl.wire import messages as wire

MakeEngine = Callable[..., Engine]
PROMPT = list(range(14))
FINISHED = RequestStatus.FINISHED_LENGTH_CAPPED


def image(name: str, offset: int = 2) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset, 3)
    )


def adapter(name: str, path: str = "/adapters/a") -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)


def prefilled(engine: Engine, request: Request) -> dict[str, Any]:
    """What the prefill engine returns for a request."""
    engine.prefill(request)
    kept, params = engine.finish(request, FINISHED)
    assert kept
    assert params is not None
    return params


def refusal(engine: Engine, request: Request) -> str:
    """Why the decode engine does not use the request's parameters, "" where it does."""
    engine.schedule(request)
    (load,) = engine.step().loads
    assert (load.remote is None) == bool(load.refusal)
    engine.manager.free(request)
    return load.refusal


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another token": ({}, {"tokens": [*PROMPT[:-1], 99]}, "token ids"),
    "a shorter prompt": ({}, {"tokens": PROMPT[:-1]}, "computed 14 tokens"),
    "a longer prompt": ({"tokens": [9, *PROMPT]}, {"tokens": [9, *PROMPT[1:], 3, 4]}, "token ids"),
    "a salt of P's alone": ({"cache_salt": "x"}, {}, "cache_salt"),
    "a salt of D's alone": ({}, {"cache_salt": "x"}, "cache_salt"),
    "another salt": ({"cache_salt": "x"}, {"cache_salt": "y"}, "cache_salt"),
    "no adapter": ({"lora_request": adapter("a")}, {}, "LoRA adapter"),
    "another adapter": (
        {"lora_request": adapter("a")},
        {"lora_request": adapter("b")},
        "LoRA adapter",
    ),
    "another image": (
        {"mm_features": [image("one")]},
        {"mm_features": [image("two")]},
        "multimodal items",
    ),
    "an image elsewhere": (
        {"mm_features": [image("one")]},
        {"mm_features": [image("one", 3)]},
        "multimodal items",
    ),
    "other embeddings": (
        {"prompt_embeds": torch.zeros(14, 4)},
        {"prompt_embeds": torch.ones(14, 4)},
        "prompt embeddings",
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
    here = request_of("here", params, lora_request=adapter("a", "/elsewhere"), **inputs)
    assert refusal(decode, here) == ""


def test_only_what_was_computed_is_compared_after_a_cut(make_engine: MakeEngine) -> None:
    prefill = make_engine("kv_producer", hybrid=True)
    decode = make_engine("kv_consumer", hybrid=True)
    params = prefilled(prefill, request_of("there", TO_PREFILL))
    last_differs = request_of("last", params, [*PROMPT[:-1], 77])
    assert refusal(decode, last_differs) == ""
    second_last_differs = request_of("second", params, [*PROMPT[:-2], 77, 13])
    assert "token ids" in refusal(decode, second_last_differs)


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


@st.composite
def inputs_of_a_request(draw: st.DrawFn) -> dict[str, Any]:
    """Few values, so that equal ones are common."""
    inputs: dict[str, Any] = {
        "tokens": draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)),
        "cache_salt": draw(st.sampled_from([None, "a"])),
    }
    name = draw(st.sampled_from(["", "a"]))
    if name:
        inputs["lora_request"] = adapter(name)
    place = draw(st.sampled_from([-1, 0, 4]))
    if place >= 0:
        inputs["mm_features"] = [image("one", place)]
    return inputs


def kv_depends_on(inputs: dict[str, Any], num_tokens: int) -> tuple[Any, ...]:
    lora = inputs.get("lora_request")
    items = [(one.identifier, one.mm_position) for one in inputs.get("mm_features", [])]
    return (
        inputs["tokens"][:num_tokens],
        inputs["cache_salt"],
        lora.lora_name if lora else "",
        [(name, place) for name, place in items if place.offset < num_tokens],
    )


@given(st.lists(inputs_of_a_request(), min_size=2, max_size=4), st.randoms())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_mixed_up_parameters_are_used_exactly_where_the_kv_cache_is_the_same(
    make_engine: MakeEngine, requests: list[dict[str, Any]], dice: Any
) -> None:
    prefill, decode = make_engine("kv_producer"), make_engine("kv_consumer")
    returned = [
        prefilled(prefill, request_of(f"there{number}", TO_PREFILL, **inputs))
        for number, inputs in enumerate(requests)
    ]
    places = list(range(len(requests)))
    dice.shuffle(places)
    for number, place in enumerate(places):
        asked, computed = requests[number], requests[place]
        num_tokens = returned[place]["remote_num_tokens"]
        same = num_tokens <= len(asked["tokens"]) and kv_depends_on(
            asked, num_tokens
        ) == kv_depends_on(computed, num_tokens)
        said = refusal(decode, request_of(f"here{number}", returned[place], **asked))
        assert (said == "") == same, (asked, computed, said)


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "secret"
    path.write_text("x" * 32)
    return {"side_channel_secret_file": str(path)}


ALTERED: dict[str, Any] = {
    "remote_engine_id": "q",
    "remote_request_id": "another",
    "remote_host": "127.0.0.2",
    "remote_port": 5601,
    "remote_block_ids": [[9, 8, 7, 6]],
    "remote_num_tokens": 13,
    "tp_size": 2,
    "remote_incarnation": "another",
    "remote_computed_at": 1 << 50,
    "remote_fence_slot": 1,
    "remote_fence_nonce": "0" * 16,
    "remote_prompt": {"tokens": "0" * 64},
    "remote_first_token": 6,
    "remote_sampling": "0123 greedy, too",
    "remote_seal": "0" * 64,
    "remote_protocol": 3,
}


UNPROVEN = {"do_remote_prefill", "do_remote_decode", "transfer_mode"}


def test_with_a_secret_no_parameter_can_be_altered(
    make_engine: MakeEngine, secret: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make_engine("kv_producer", **secret), make_engine("kv_consumer", **secret)
    monkeypatch.setattr(prefills, "offer", lambda own, request: (5, "0123 greedy"))
    params = prefilled(prefill, request_of("there", TO_PREFILL))
    assert set(params) - set(ALTERED) == UNPROVEN
    assert refusal(decode, request_of("r", params)) == ""
    reordered = dict(reversed(params.items()))
    assert refusal(decode, request_of("reordered", reordered)) == ""
    for name, value in ALTERED.items():
        assert "altered" in refusal(decode, request_of(name, {**params, name: value})), name
        without = {key: old for key, old in params.items() if key != name}
        assert refusal(decode, request_of(f"no {name}", without)), name


def test_a_secret_on_one_side_alone_is_named(
    make_engine: MakeEngine, secret: dict[str, str], tmp_path: Path
) -> None:
    with_secret, without = secret, dict[str, str]()
    sides = {"P": (with_secret, without), "D": (without, with_secret)}
    for side, (there, here) in sides.items():
        prefill, decode = make_engine("kv_producer", **there), make_engine("kv_consumer", **here)
        params = prefilled(prefill, request_of("there", TO_PREFILL))
        said = refusal(decode, request_of("r", params))
        words = "this decode engine has none" if side == "P" else "carry no proof"
        assert words in said
        assert "side_channel_secret_file" in said
    (tmp_path / "other").write_text("y" * 32)
    prefill = make_engine("kv_producer", side_channel_secret_file=str(tmp_path / "other"))
    decode = make_engine("kv_consumer", **secret)
    params = prefilled(prefill, request_of("there", TO_PREFILL))
    assert "another secret" in refusal(decode, request_of("r", params))


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


def of_version_0_2() -> dict[str, Any]:
    params = to_decode()
    for name in ("remote_protocol", "remote_prompt", "remote_seal"):
        del params[name]
    return params


def test_a_prefill_engine_of_version_0_2_is_told_and_not_read(make_engine: MakeEngine) -> None:
    decode = make_engine("kv_consumer")
    decode.schedule(request_of("r", of_version_0_2()))
    told, load = decode.step().loads
    assert load.refusal.startswith(f"kv_transfer_params: expected remote_protocol {4}, got none")
    assert "install the same vllm-commext on both engines" in load.refusal
    assert load.remote is None
    # Our question to its side channel is what it can understand enough of to say why it refuses.
    assert (told.awaited, told.blocks, told.refusal) == (False, (), "")
    assert (told.remote.host, told.remote.port) == ("127.0.0.1", 5600)


def test_nothing_is_sent_to_version_0_2_where_a_secret_is_asked_for(
    make_engine: MakeEngine, secret: dict[str, str]
) -> None:
    decode = make_engine("kv_consumer", **secret)
    assert "carry no proof" in refusal(decode, request_of("r", of_version_0_2()))


def test_the_versions_refuse_each_other_with_one_remedy() -> None:
    """A frame as 0.2.0 sends it, and ours as 0.2.0 sees it."""
    old = b"\x86\xa4kind\xa8describe\xa5magic\xaccommext-nixl\xa7version\x03"
    old += b"\xa9engine_id\xa1e\xa7tp_rank\x00\xa8consumer\xa1d"
    with pytest.raises(Exception, match="protocol 4.*protocol 3.*install the same vllm-commext"):
        wire.decode_request(old)
    assert b"\xa7version\x04" in wire.encode(wire.Refused(reason="r"))
    assert b"\xa7version\x04" in wire.encode(wire.DescribeRequest(engine_id="e", tp_rank=0))
