"""Rewrites a request for its two steps. Pure.

An engine's answer carries one `kv_transfer_params`, which names the blocks of one sequence. With
several prompts vLLM would load the first one's blocks for all. With ``n`` above 1 the sample that
first finishes its read frees blocks that others still read. So a request of several sequences goes
to a decode engine as it is.
"""

from collections.abc import Mapping
from typing import Any

from vllm_commext.errors import Reason
from vllm_commext.proxy.http.body import LENGTHS, RawJson
from vllm_commext.proxy.http.endpoints import COMPLETIONS, Endpoint, prompt_tokens
from vllm_commext.proxy.outcome import bad_request


class AtOnce(Reason):
    """Label of a two-step request: both at once, or the reason against it."""

    STREAMED = "streamed", "both at once"
    OFF = "off", "it is off"
    NOT_KNOWN = "not_known", "the prefill engine has not said yet that it streams, and where"
    DECODE = "decode", "a decode engine does not say that it reads streams"
    SEVERAL = "several", "several side channels answer for the prefill engine"
    ONE_TOKEN = "one_token", "the answer is one token, for which nothing need be read"
    BUSY = "busy", "enough requests wait for the prefill engine already"
    AGAIN = "again", "the request is served anew"
    FAILED = "failed", "the decode engine failed after both at once; one after the other then"
    ALONE = "alone", "the prefill engine was lost, and the decode engine went on without it"


class LocalPrefill(Reason):
    """Reason why a decode engine computes a prompt itself."""

    NO_PARAMETERS = "no_kv_transfer_params", "the prefill engine's answer has no parameters"
    PREFILL_AWAY = "prefill_away", "no prefill engine can be reached"
    PREFILL_FAILED = "prefill_failed", "prefill engines have failed"
    AFTER_FAILURE = "after_failure", "served anew, after a prefill engine's failure"
    PLACEMENT = "placement", "so it is placed: see commext_proxy_placements"
    NO_READER = "no_reader", "no other engine can be asked than the one that has computed it"
    SHORT_PROMPT = "short_prompt", "the prompt is shorter than --min-prompt-tokens"
    SEVERAL_SAMPLES = "several_samples", "parameters name the blocks of one sequence"
    BEAM_SEARCH = "beam_search", "beam search drops the parameters"
    NOT_ONE_PROMPT = "not_one_prompt", "parameters name the blocks of one sequence"
    PROMPT_LOGPROBS = "prompt_logprobs", "only the engine that computes the prompt knows them"
    TRUNCATION = "truncation", "with another max_tokens it may mean another prompt"
    NO_GENERATION = "no_generation", "no token is asked for"


KEEP_FOR_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# A stop token would end the prefill as "stopped", for which a connector need not hand over blocks;
# the token itself is thrown away.
_NOT_FOR_PREFILL = ("stop_token_ids",)
OWN_IDS = "prompt_token_ids"
"""The member of ``kv_transfer_params`` that clients may set; vLLM checks the ids."""
MAX_SMALL_BYTES = 2 << 20


def checked_body(body: Any) -> dict[str, Any]:
    """Check a client's *body*. Raises `ProxyError` 400."""
    if not isinstance(body, dict):
        raise bad_request(f"expected a JSON object as body, got {type(body).__name__}")
    own = body.get("kv_transfer_params") or {}
    if not isinstance(own, dict):
        raise bad_request("kv_transfer_params: expected an object")
    if own and set(own) != {OWN_IDS}:
        raise bad_request(
            "kv_transfer_params is what this proxy sets to bring the two engines together: "
            f"expected {OWN_IDS} alone, got {sorted(own)[:8]}; remove the others from the request, "
            "or talk to the engines directly"
        )
    sampling = body.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    for name, value in (
        (OWN_IDS, own),
        ("vllm_xargs", body.get("vllm_xargs")),
        ("extra_args", extra),
    ):
        if value:
            _check_small(name, value)
        if isinstance(value, dict) and "kv_transfer_params" in value:
            raise bad_request(f"expected {name} without kv_transfer_params, which this proxy sets")
    return body


def _check_small(name: str, value: Any) -> None:
    inner = value.values() if isinstance(value, dict) else (value,)
    if sum([len(one.text) for one in inner if isinstance(one, RawJson)]) > MAX_SMALL_BYTES:
        raise bad_request(f"expected {name} of at most {MAX_SMALL_BYTES} bytes")


def local_prefill_reason(
    endpoint: Endpoint, body: Mapping[str, Any], min_prompt_tokens: int = 0
) -> LocalPrefill | None:
    """Reason why *body* cannot take two steps, or None. Values of an unexpected type count as one:
    the decode engine judges them."""
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return LocalPrefill.SEVERAL_SAMPLES
    if body.get("use_beam_search"):
        return LocalPrefill.BEAM_SEARCH
    if endpoint is COMPLETIONS and not _is_one_prompt(body):
        return LocalPrefill.NOT_ONE_PROMPT
    if _wants_prompt_logprobs(endpoint, body):
        return LocalPrefill.PROMPT_LOGPROBS
    if not _is_count(body.get("truncate_prompt_tokens")):
        return LocalPrefill.TRUNCATION
    if 0 in map(body.get, LENGTHS):
        return LocalPrefill.NO_GENERATION
    if min_prompt_tokens and prompt_tokens(body) < min_prompt_tokens:
        return LocalPrefill.SHORT_PROMPT
    return None


def _is_one_prompt(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None or not isinstance(prompt, RawJson):
        return False
    is_one_item = prompt.num_items == 1 or prompt.item_kind.isdigit()
    return prompt.kind == '"' or (prompt.kind == "[" and is_one_item)


def _wants_prompt_logprobs(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    if body.get("prompt_logprobs") is not None:
        return True
    echoes = endpoint is COMPLETIONS and bool(body.get("echo"))
    return echoes and body.get("logprobs") is not None


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value >= 0)


def prefill_body(body: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Body for one token of the same prompt. All else stays, so that what an engine refuses is
    refused here: with a *key* the client's own limits, too."""
    step = dict(body) if key else _of_one_token(body)
    if body.get("stream"):
        step.pop("stream_options", None)  # an error without streaming
    step["stream"] = False
    step["kv_transfer_params"] = {**_own_params(body), **KEEP_FOR_DECODE}
    if key:
        step["kv_transfer_params"]["prefill_key"] = key
    return step


def _of_one_token(body: Mapping[str, Any]) -> dict[str, Any]:
    step = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    step.update(max_tokens=1, ignore_eos=True)
    if "max_completion_tokens" in step:
        step["max_completion_tokens"] = 1
    min_tokens = step.get("min_tokens")
    if isinstance(min_tokens, int | float) and min_tokens > 1:
        step["min_tokens"] = 1
    return step


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "kv_transfer_params": {**_own_params(body), **kv_transfer_params}}


def _own_params(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return body.get("kv_transfer_params") or {}
