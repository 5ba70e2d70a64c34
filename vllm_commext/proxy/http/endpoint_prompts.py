"""One description of each endpoint that engines serve: its prompt, its answer, and what may be done
with a request to it. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_commext.proxy.http.json_members import LENGTHS, OBJECTS, RawJson, dumps, num_tokens

MAX_SAMPLES = 1 << 14
MOST_TOKENS = 1 << 15
MAX_NAME_BYTES = 64 << 10
"""Looked at of a model's name or a salt."""
_PARAMS, _IDS = "kv_transfer_params", "prompt_token_ids"
_TEMPLATE = ("chat_template", "chat_template_kwargs", "documents", "tools")
_SAMPLES = ("n", "best_of")
_CACHE_MARK = re.compile(rb'(?:,\s{0,4})?"cache_control"\s{0,4}:\s{0,4}\{[^{}]{0,200}\}')
_BILLING = re.compile(rb'x-anthropic-billing-header(?:[^"\\]|\\.)*')
_OPENING = re.compile(
    rb'\[?\s*(?:\{\s*(?:"(?:type|role)"\s*:\s*"\w*"\s*,\s*)*"content"\s*:\s*)?'
    rb'(?:\[\s*\{\s*(?:"type"\s*:\s*"\w*"\s*,\s*)?"text"\s*:\s*)?"'
)
"""Of a conversation before its first text: the same text may come as a string or in an item."""
_OPENING_BYTES = 1024
# Long members that no prompt is made of.
_NO_PROMPT = frozenset((_IDS,)).union(
    ("allowed_token_ids", "bad_words", "logit_bias", "logprob_token_ids", "metadata", "stop"),
    ("output_config", "response_format", "stop_token_ids", "structured_outputs", "text"),
)


@dataclass(frozen=True)
class Endpoint:
    """name: a metric's label. prompt: members that become the prompt, in the order in which
    templates write them. answer: a member of every answer. lengths: members that bound the answer.
    is_split: a prefill and a decode engine may share it; then its streams may be resumed and moved,
    too. computes: it takes an engine's accelerator. keeps: its engine knows the answer by its id.
    is_free_form: an answer need not be JSON."""

    name: str
    prompt: tuple[str, ...]
    answer: str = "choices"
    lengths: tuple[str, ...] = LENGTHS
    is_split: bool = False
    computes: bool = True
    keeps: bool = False
    is_free_form: bool = False

    @property
    def form(self) -> tuple[str, bool]:
        return self.answer, self.is_free_form


COMPLETIONS = Endpoint("completions", ("prompt_embeds", "prompt", "suffix"), is_split=True)
CHAT = Endpoint("chat", (*_TEMPLATE, "messages"), is_split=True)
ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": Endpoint("chat_batch", CHAT.prompt),
    "/v1/messages": Endpoint("messages", ("system", *_TEMPLATE, "messages"), "content"),
    "/v1/responses": Endpoint(
        *("responses", ("instructions", *_TEMPLATE, "previous_input_messages", "input"), "output"),
        lengths=("max_output_tokens",),
        keeps=True,
    ),
    "/inference/v1/generate": Endpoint("generate", ("features", "content_parts", "token_ids")),
    "/v1/embeddings": Endpoint("embeddings", ("input", "messages"), "data", is_free_form=True),
    "/v1/messages/count_tokens": Endpoint(
        "count_tokens", ("system", *_TEMPLATE, "messages"), "input_tokens", computes=False
    ),
    "/tokenize": Endpoint("tokenize", ("prompt", *CHAT.prompt), "tokens", computes=False),
    "/detokenize": Endpoint("detokenize", ("tokens",), "prompt", computes=False),
}
"""By path; whatever is posted elsewhere is answered with 404."""


def _own_ids(body: Mapping[str, Any]) -> Any:
    """Ids that the client gives in place of the prompt's text."""
    params = body.get(_PARAMS)
    return params.get(_IDS) if isinstance(params, dict) else None


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Estimate the tokens of one prompt, or of all in a batch: at least 1. A long member counts by
    its bytes, like text, whether it is known here or not."""
    total = _counted(body)
    for name in OBJECTS:
        if isinstance(inner := body.get(name), dict):
            total += _counted(inner)
    return max(total, num_tokens(_own_ids(body)), 1)


def _counted(holder: Mapping[str, Any]) -> int:
    texts = [(name, one) for name, one in holder.items() if isinstance(one, RawJson)]
    return sum([num_tokens(one) for name, one in texts if name not in _NO_PROMPT])


def num_samples(body: Mapping[str, Any]) -> int:
    """Times that a request's prompts count."""
    given = [_count(one[name]) for one in _holders(body) for name in _SAMPLES if name in one]
    return min(max(1, *given), MAX_SAMPLES) if given else 1


def _count(value: Any) -> int:
    """Number of samples, as loosely as engines read it."""
    is_text = isinstance(value, str) and value.isdecimal() and len(value) < 8
    return int(value) if is_text or isinstance(value, int | float) else 1


def _holders(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sampling = body.get("sampling_params")
    return [body, sampling] if isinstance(sampling, dict) else [body]


def most_tokens(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """Bound on the answer's tokens."""
    given = [one.get(name) for one in _holders(body) for name in endpoint.lengths]
    return next((n for n in given if isinstance(n, int) and n > 0), MOST_TOKENS)


def names_of(body: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Model and salt: engines tell the same prompts apart by them."""
    found = body.get("model"), body.get("cache_salt")
    return [one.text[:MAX_NAME_BYTES] if isinstance(one, RawJson) else dumps(one) for one in found]


def prompt_text(endpoint: Endpoint, body: Mapping[str, Any], max_bytes: int) -> tuple[bytes, int]:
    """Beginning of the prompt as far as engines' caches tell prompts apart, and all its bytes."""
    own = _own_ids(body)
    parts = [own] if own is not None else [body.get(name) for name in endpoint.prompt]
    found, total = b"", 0
    for part in parts:
        if isinstance(part, RawJson):
            total += max(len(part.text) - 2, 0)
            if len(found) < max_bytes:
                found += _same_text(bytes(part.text[: max_bytes + 2 - len(found)]), part)
    return found[:max_bytes], total


def _same_text(text: bytes, part: RawJson) -> bytes:
    """Without what clients change from turn to turn, and engines do not see."""
    is_whole = len(text) == len(part.text)
    text = text[:-1] if is_whole else text
    opening = _OPENING.match(text, 0, _OPENING_BYTES)
    text = text[opening.end() if opening else 1 :]
    if b'"cache_control"' in text:
        text = _CACHE_MARK.sub(b"", text)
    return _BILLING.sub(b"", text, 1) if b"x-anthropic-billing" in text[:4096] else text
