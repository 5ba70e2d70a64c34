"""Whether the token that a prefill engine has sampled may go to the client at once. Pure.

The prefill engine has looked at all that decides what the first token is: it names a token only
where a decode engine answers with the same one. Looked at here is what decides how it is written.
A request may ask for anything that leaves the first token's text alone in the first event.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from vllm_commext.proxy.body import RawJson
from vllm_commext.proxy.two_step import CHAT

EARLY = "early"
OFF = "off"
NOT_STREAMED = "not_streamed"
NO_PREFILL = "no_prefill"
REQUEST = "request"
ONE_TOKEN = "one_token"
NOT_OFFERED = "not_offered"
ENDS = "ends"
TEXT = "text"
UNPROVEN = "unproven"
REFUTED = "refuted"
STREAMED = "streamed"
WAYS = (
    EARLY,
    OFF,
    NOT_STREAMED,
    NO_PREFILL,
    REQUEST,
    ONE_TOKEN,
    NOT_OFFERED,
    ENDS,
    TEXT,
    UNPROVEN,
    REFUTED,
    STREAMED,
)
"""When a request's first token is sent: early, or later for one of the other reasons."""

# What no event's form follows from; everything else that a request asks for is part of the form.
_CONTENT = frozenset(
    (
        *("prompt", "messages", "max_tokens", "max_completion_tokens", "stop_token_ids"),
        *("user", "request_id", "session_id", "cache_salt", "priority"),
    )
)
_DRAWN_BY = frozenset(("temperature", "top_p", "top_k", "min_p"))
_FORM = frozenset(
    (
        *("model", "stream", "stream_options", "return_token_ids", "ignore_eos"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "chat_template_kwargs", "documents", "reasoning_effort"),
    )
)
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "include_reasoning": (True,),
    "response_format": ({"type": "text"},),
}
"""Values that ask for nothing, beside null, false and what is empty."""
_STREAM_OPTIONS = {"include_usage", "continuous_usage_stats"}
# What parsers of reasoning and of tool calls may take out of a chat's text.
_MARKUP = ("<", "[")
# The end of a text that is half a character, and what no UTF-8 can be.
_UNFINISHED = re.compile("\ufffd$|[\ud800-\udfff]")


@dataclass(frozen=True)
class FirstToken:
    """A prefill engine's token. role: of a chat's answer. prompt_token_ids: if asked for. drawn_by:
    what of that engine's own such tokens follow from, "" for a greedy one."""

    text: str
    token: int
    model: str
    num_prompt_tokens: int
    role: str = ""
    prompt_token_ids: list[int] | None = None
    drawn_by: str = ""


def refusal(body: Mapping[str, Any]) -> str:
    """Why the first token of such a request is not sent early, one of `WAYS`; "" if it may be."""
    if body.get("stream") is not True:
        return NOT_STREAMED
    if not all(_asks_for_nothing_else(name, value) for name, value in body.items()):
        return REQUEST
    bounds = (body.get(name) for name in ("max_tokens", "max_completion_tokens"))
    if not all(bound is None or (_is_int(bound) and bound > 1) for bound in bounds):
        return ONE_TOKEN
    return ""


def first_token_of(endpoint: str, body: Mapping[str, Any], answer: Any) -> FirstToken | str:
    """The token in a prefill engine's answer to *body*, or why it is not sent early."""
    params = _member(answer, "kv_transfer_params")
    token = params.get("remote_first_token")
    if not _is_int(token) or token < 0:
        return NOT_OFFERED
    if params.get("remote_first_token_goes_on") is not True or token in _stops(body):
        return ENDS
    choice = only_choice(answer) or {}
    message = _member(choice, "message") if endpoint == CHAT else {"content": choice.get("text")}
    text, role = message.get("content"), message.get("role", "")
    if choice.get("finish_reason") != "length" or not isinstance(role, str):
        return TEXT
    if not isinstance(text, str) or not text or _UNFINISHED.search(text):
        return TEXT
    others = (value for name, value in message.items() if name not in ("content", "role"))
    if endpoint == CHAT and (any(others) or text.lstrip().startswith(_MARKUP)):
        return TEXT
    num_prompt, model = _member(answer, "usage").get("prompt_tokens"), answer.get("model")
    if not _is_int(num_prompt) or not isinstance(model, str):
        return TEXT
    prompt_token_ids = (answer if endpoint == CHAT else choice).get("prompt_token_ids")
    if body.get("return_token_ids") and not isinstance(prompt_token_ids, list):
        return NOT_OFFERED
    return FirstToken(
        text, token, model, num_prompt, role, prompt_token_ids, _drawn_by(body, params)
    )


def form_of(endpoint: str, body: Mapping[str, Any], drawn_by: str = "") -> str:
    """A name of what the form of the first events follows from, and of how tokens are drawn: by the
    request's own values or by an engine's, and on an engine with these facts of its own: a decode
    engine that takes tokens of one prefill engine may refuse those of another."""
    told = {
        name: "given" if name in _DRAWN_BY else value
        for name, value in body.items()
        if name not in _CONTENT and value is not None
    }
    if is_greedy(body):
        told["temperature"] = "greedy"
    text = json.dumps([endpoint, told, drawn_by], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _drawn_by(body: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """What a prefill engine says that it draws by, without what the request says itself."""
    told = params.get("remote_sampling")
    if is_greedy(body) or not isinstance(told, str):
        return ""
    given = {name for name in _DRAWN_BY if body.get(name) is not None}
    return " ".join(word for word in told.split() if word.partition("=")[0] not in given)


def is_greedy(body: Mapping[str, Any]) -> bool:
    """Whether any engine gives the same answer to *body* again."""
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and temperature == 0


def only_choice(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The one choice of an answer or an event, None if there is not exactly one."""
    choices = content.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    return choices[0]


def _asks_for_nothing_else(name: str, value: Any) -> bool:
    if value is None or value is False or name in _CONTENT or name in _DRAWN_BY:
        return True
    if isinstance(value, RawJson):
        return False
    if name == "stream_options":
        return isinstance(value, dict) and set(value) <= _STREAM_OPTIONS
    if name in _FORM or value in _DEFAULTS.get(name, ()):
        return True
    return isinstance(value, str | list | dict) and not value


def _stops(body: Mapping[str, Any]) -> list[Any]:
    stops = body.get("stop_token_ids")
    return stops if isinstance(stops, list) else []


def _member(content: Any, name: str) -> Mapping[str, Any]:
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
