"""Requests whose first token may come from the prefill engine, and what a client is told."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.kit import parity
from tests.kit.metrics import Metrics

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIRST_TOKENS = "vllm:commext_nixl_first_tokens_total"
# Path, what the request asks for beside its prompt, and the way of its first token.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "greedy": (COMPLETIONS, {}, "prefill"),
    "one token": (COMPLETIONS, {"max_tokens": 1}, "prefill"),
    "two tokens": (COMPLETIONS, {"max_tokens": 2}, "prefill"),
    "a first token that stops": (COMPLETIONS, {"stop_token_ids": list(range(256))}, "prefill"),
    "stop strings": (COMPLETIONS, {"stop": list("aeio"), "max_tokens": 40}, "prefill"),
    "a seed": (COMPLETIONS, {"temperature": 0.8, "seed": 7}, "seeded"),
    "a penalty": (COMPLETIONS, {"presence_penalty": 1.5}, "penalties"),
    "log probabilities": (COMPLETIONS, {"logprobs": 2}, "logprobs"),
    "a least length": (COMPLETIONS, {"min_tokens": 3}, "min_tokens"),
    "a chat": (CHAT, {}, "prefill"),
    "a chat of one token": (CHAT, {"max_tokens": 1}, "prefill"),
}


# What a piece has of each of its tokens, of which it may hold one or several.
_END_TO_END = ("text", "content", "token_ids", "text_offset")
# The fingerprint is that of a server's configuration.
_NAMES = ("id", "created", "system_fingerprint")


def check_source(added: Metrics, way: str, count: int = 1) -> None:
    """So many first tokens came in a way; one that comes later than its prompt, as on a busy
    machine, is the decode server's own."""
    late = added.total(FIRST_TOKENS, way="not_offered") if way == "prefill" else 0
    assert added.total(FIRST_TOKENS, way=way) + late == added.total(FIRST_TOKENS) == count


def told(url: str, path: str, body: Mapping[str, Any], *, stream: bool) -> Any:
    """What an answer says but for names and times of its own; a stream's pieces are put together,
    since how many tokens one holds depends on how fast they are taken."""
    if not stream:
        return _without_names(parity.post(f"{url}{path}", body).json())
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with parity.stream(f"{url}{path}", streamed) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return _joined([_without_names(json.loads(line)) for line in lines[:-1]])


def _without_names(piece: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in piece.items() if name not in _NAMES}


def _joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object of a stream's: texts and lists end to end, of all else the values in order."""
    joined: dict[str, Any] = {}
    for piece in pieces:
        for place, value in _leaves(piece):
            known = joined.get(place)
            if isinstance(value, (str, list)) and place.endswith(_END_TO_END):
                joined[place] = value if known is None else known + value
            elif value is not None and (known is None or value not in known):
                joined[place] = [*(known or []), value]
    return joined


def _leaves(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """Each value of an object with its place; lists of numbers are one value."""
    if isinstance(value, dict):
        return [leaf for name, one in value.items() for leaf in _leaves(one, f"{place}.{name}")]
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return [leaf for one in value for leaf in _leaves(one, place)]
    return [(place, value)]
