"""Rewriting a request for its two steps. Pure: bodies in, bodies out, nothing else.

A request can take the two steps only if it becomes exactly one sequence in the engine, since
the engine's answer carries one `kv_transfer_params`, which names the blocks of one sequence:

- With several prompts, vLLM answers with the first prompt's parameters alone and, given them
  back, would load the first prompt's blocks for every prompt.
- With ``n`` above 1, each sample is a sequence of its own with the same parameters. The first
  to finish its read tells the prefill engine to free the blocks that the others still read.
- Beam search drops the parameters.

Some requests ask for what only the engine that computes the prompt knows (log-probabilities of
prompt tokens), or mean another prompt once ``max_tokens`` is 1 (truncation to what is left of
the context). All of these go to a decode engine as they are, which prefills for itself.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm_commext.proxy.failures import ProxyError

COMPLETIONS = "completions"
CHAT = "chat"

NO_PARAMETERS = "no_kv_transfer_params"
SEVERAL_SAMPLES = "several_samples"
BEAM_SEARCH = "beam_search"
NOT_ONE_PROMPT = "not_one_prompt"
PROMPT_LOGPROBS = "prompt_logprobs"
TRUNCATION = "truncation"
NO_GENERATION = "no_generation"
LOCAL_PREFILL_REASONS = (
    NO_PARAMETERS,
    SEVERAL_SAMPLES,
    BEAM_SEARCH,
    NOT_ONE_PROMPT,
    PROMPT_LOGPROBS,
    TRUNCATION,
    NO_GENERATION,
)

KEEP_FOR_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# stream_options is an error without streaming. A stop token would end the prefill as "stopped",
# for which a connector need not hand over blocks; the token itself is thrown away.
_NOT_FOR_PREFILL = ("stream_options", "stop_token_ids")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_body(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises `ProxyError` 400 when *raw* is anything else."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise _bad_request(f"expected a JSON object as body, got {type(body).__name__}")
    if body.get("kv_transfer_params") is not None:
        raise _bad_request(
            "kv_transfer_params is what this proxy sets to bring the two engines together; "
            "remove it from the request, or talk to the engines directly"
        )
    return body


def _bad_request(message: str) -> ProxyError:
    return ProxyError(400, "bad_request", message)


def local_prefill_reason(endpoint: str, body: Mapping[str, Any]) -> str | None:
    """Why *body* cannot take the two steps (one of `LOCAL_PREFILL_REASONS`), or None if it can.

    Values of an unexpected type count as a reason: the decode engine then judges them itself.
    """
    if not all(body.get(name) in (None, 1) for name in ("n", "best_of")):
        return SEVERAL_SAMPLES
    if body.get("use_beam_search"):
        return BEAM_SEARCH
    if endpoint == COMPLETIONS and not _is_one_prompt(body):
        return NOT_ONE_PROMPT
    if _wants_prompt_logprobs(endpoint, body):
        return PROMPT_LOGPROBS
    if not _is_count(body.get("truncate_prompt_tokens")):
        return TRUNCATION
    if any(body.get(name) == 0 for name in ("max_tokens", "max_completion_tokens")):
        return NO_GENERATION
    return None


def _is_one_prompt(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None:
        return False
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list) or not prompt:
        return False
    return len(prompt) == 1 or isinstance(prompt[0], int)


def _wants_prompt_logprobs(endpoint: str, body: Mapping[str, Any]) -> bool:
    if body.get("prompt_logprobs") is not None:
        return True
    echoes = endpoint == COMPLETIONS and bool(body.get("echo"))
    return echoes and body.get("logprobs") is not None


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value >= 0)


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """*body* for the prefill engine: the same prompt, one token that nobody will see.

    All else stays, so that a request an engine would refuse is refused here, before any block
    is kept for it.
    """
    step = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    step.update(max_tokens=1, stream=False, ignore_eos=True)
    if "max_completion_tokens" in step:
        step["max_completion_tokens"] = 1
    min_tokens = step.get("min_tokens")
    if isinstance(min_tokens, int | float) and min_tokens > 1:
        step["min_tokens"] = 1
    step["kv_transfer_params"] = dict(KEEP_FOR_DECODE)
    return step


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
    """*body* for the decode engine: the client's request and the prefill engine's answer."""
    return {**body, "kv_transfer_params": kv_transfer_params}


def encode(body: Mapping[str, Any]) -> bytes:
    """*body* as JSON, so that an engine reads exactly what was judged here."""
    return json.dumps(body, separators=(",", ":")).encode()
