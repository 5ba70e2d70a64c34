"""Decides if the token that a prefill engine sampled after a prompt is the decode engine's first.

That is exact where both draw it from the same distribution, as docs/nixl_connector.md lists.
``Sampler.digest`` covers every fact of an engine that peers compare and travels with the token,
which is used before the engines have shaken hands. What ends an answer does not count. Everything
else, also of a later vLLM, goes the usual way.

So do seeds, as the second token depends on the state that the first one's drawing leaves, and the
samples of one request, which must be independent.  Afterwards the scheduler takes the token for the
last one of the prompt, which no remaining parameter can tell.  Imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_commext.errors import Reason

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_commext.nixl.wire.params import TransferParams


class FirstToken(Reason):
    """The source of a request's first token, or the reason to compute it on the decode engine."""

    PREFILL = "prefill", "the prefill engine's"
    RESUMED = "resumed", "an answer that another decode engine has begun, and that goes on here"
    OFF = "off", "first tokens are not handed over here"
    ENGINE = "engine", "this engine speculates, or changes logits by rules of its own"
    NOT_OFFERED = "not_offered", "the prefill engine offers none"
    DIFFERS = "differs", "the prefill engine drew it by something else, or after another prompt"
    PARAMETERS = "parameters", "a parameter of the request binds it to this engine"
    PROMPT = "prompt", "its prompt is not one of tokens alone"


NO_TOKEN = -1
GREEDY = "greedy"
_DRAWN_BY = ("temperature", "top_p", "top_k", "min_p")
_WITHOUT_EFFECT = {
    # Where an answer ends.
    *("max_tokens", "stop", "stop_token_ids", "ignore_eos", "_eos_token_id", "_all_stop_token_ids"),
    # How it is written out.
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
    *("include_stop_str_in_output", "output_text_buffer_length", "stream_interval"),
    # What plugins read, which an engine has or has not, and bookkeeping.
    *("extra_args", "skip_clone", "flat_logprobs", "truncate_prompt_tokens"),
}
# vLLM names the samples of one request after their number.
_SAMPLE = re.compile(r"\d+_")


@dataclass(frozen=True)
class Sampler:
    """An engine's influence on first tokens beside the prompt and a request's parameters.

    Attributes:
        refusal: why this engine computes all first tokens, None to look at each request.
    """

    digest: str = ""
    num_tokens: int = 0
    refusal: FirstToken | None = FirstToken.ENGINE


def facts_digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def refusal_of(own: Sampler, request: Request) -> FirstToken | None:
    if own.refusal:
        return own.refusal
    has_more = request.prompt_embeds is not None or request.mm_features or request.resumable
    if request.prompt_token_ids is None or has_more:
        return FirstToken.PROMPT
    params = request.sampling_params
    is_usual = params is not None and not _is_unusual(params)
    return None if is_usual and not _SAMPLE.match(request.request_id) else FirstToken.PARAMETERS


def offer(own: Sampler, request: Request) -> tuple[int, str]:
    """The first token that a prefill engine sampled and how it was drawn; (-1, "") if another
    engine could not use it."""
    tokens = request.output_token_ids
    if not len(tokens) or refusal_of(own, request):
        return NO_TOKEN, ""
    return tokens[0], _drawn_by(own, request.sampling_params)


def source_of(own: Sampler, transfer_params: TransferParams, request: Request) -> FirstToken:
    """Decide where a first token comes from; ``transfer_params`` fit the request's prompt."""
    reason = refusal_of(own, request)
    if reason:
        return reason
    if transfer_params.first_token < 0:
        return FirstToken.NOT_OFFERED
    # A shorter prompt, of which this one is a continuation, is followed by another token.
    is_same = transfer_params.remote.num_tokens == request.num_prompt_tokens
    is_same = is_same and transfer_params.sampling == _drawn_by(own, request.sampling_params)
    return FirstToken.PREFILL if is_same else FirstToken.DIFFERS


def _is_unusual(params: Any) -> bool:
    return any(
        field.name not in _WITHOUT_EFFECT
        and field.name not in _DRAWN_BY
        and not _is_default(field, getattr(params, field.name))
        for field in msgspec.structs.fields(params)
    )


def _is_default(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    if value is None or value is False or (isinstance(value, (list, set, dict)) and not value):
        return True
    return isinstance(value, (bool, int, float, str)) and bool(value == field.default)


def _drawn_by(own: Sampler, params: Any) -> str:
    if params.temperature == 0:
        return f"{own.digest} {GREEDY}"
    values = (f"{name}={getattr(params, name)!r}" for name in _DRAWN_BY)
    return " ".join((own.digest, *values))
