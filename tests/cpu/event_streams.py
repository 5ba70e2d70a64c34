"""Streamed answers as they came, event by event, so that two servers' can be compared to the byte
but for names and times of their own."""

import json
import re
import uuid
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx

from tests.kit import cluster, parity
from tests.kit.metrics import Metrics
from tests.kit.servers import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIRST_TOKENS = "vllm:commext_nixl_first_tokens_total"
NUM_TRIES = 400
# What one event has of its tokens, of which it may hold one or several.
_TEXTS = ("content", "reasoning", "text")
_LISTS = ("token_ids", "tool_calls", "prompt_token_ids")
_MARK = re.compile("\ufffd*(</?think>|\\Z)")
_numbers = count()


@dataclass
class Told:
    """A stream's events as they came."""

    path: str
    raw: bytes

    @property
    def events(self) -> list[bytes]:
        assert self.raw.endswith(b"\n\n")
        return self.raw.split(b"\n\n")[:-1]


class Middle(set[bytes]):
    """Events of an answer that have nothing but texts and lists, without these. Two are equal if
    one is empty: all tokens may come in the first and the last event."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return not self or not other or set.__eq__(self, other)


def asked(
    server: Server, path: str, body: Mapping[str, Any], request_id: str
) -> AbstractContextManager[httpx.Response]:
    return parity.stream(f"{server.url}{path}", body, headers={"X-Request-Id": request_id})


def told(server: Server, path: str, body: Mapping[str, Any], request_id: str = "") -> Told:
    with asked(server, path, body, request_id or uuid.uuid4().hex) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return Told(answer.headers.get("X-Commext-Path", ""), answer.read())


def canonical(stream: Told) -> dict[str, Any]:
    """All of a stream but how its tokens are cut into events, which follows from how fast they are
    taken: texts and lists end to end, by field, the counts, and every event without these, to the
    byte.

    The time and a server's fingerprint are left out too."""
    *events, done = stream.events
    assert done == b"data: [DONE]"
    said: dict[str, Any] = defaultdict(list)
    frames, middle, times = list[bytes](), Middle(), set()
    for raw in events:
        content = json.loads(raw.removeprefix(b"data: "))
        assert _written(content) == raw, "vLLM writes JSON in another way"
        times.add(content["created"])
        content["created"] = 0
        if content.get("system_fingerprint"):
            content["system_fingerprint"] = "fp"
        for choice in content["choices"]:
            _take_apart(choice, said)
        if content.get("usage"):
            usage = content["usage"]
            counts = usage.get("completion_tokens_details") or {}
            said["usage"].append((usage["completion_tokens"], counts.pop("reasoning_tokens", 0)))
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            usage["completion_tokens"] = usage["total_tokens"] = 0
        frame = _written(content)
        more = [one.get("finish_reason") or one.get("delta") for one in content["choices"]]
        if more and not any(more):
            middle.add(frame)
        elif frame not in frames:
            frames.append(frame)
    assert len(times) == 1, "an answer was created once"
    assert said["usage"] == sorted(said["usage"])
    said["usage"] = said["usage"][-1:]
    return {"frames": frames, "middle": middle, **said}


def tokens_and_first(stream: Told) -> dict[str, Any]:
    """What a chat tells whatever its parsers make of how tokens are cut into events: all but the
    texts, and the first character of each field."""
    whole = canonical(stream)
    return {**whole, **{name: whole[name][:1] for name in _TEXTS}, "tool_calls": []}


def tokens_and_words(stream: Told) -> dict[str, Any]:
    """What a chat tells but for marks, which its reasoning parser leaves in the midst of events
    that were merged, as they are where they are taken slowly, and half a character before one."""
    whole = canonical(stream)
    return {**whole, **{name: _MARK.sub("", whole[name]) for name in _TEXTS}}


def _written(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def rounded(answer: str) -> Any:
    """JSON without what differs of log probabilities where a prompt is computed in other steps."""
    return json.loads(answer, parse_float=lambda number: round(float(number), 2))


def _take_apart(choice: dict[str, Any], said: dict[str, Any]) -> None:
    holder = choice.get("delta", choice)
    for name in _TEXTS:
        # A parser leaves out an empty text that comes by itself.
        said[name] = "".join(said[name]) + (holder.pop(name, None) or "")
    for name in _LISTS:
        for place in (holder, choice):
            said[name] = said[name] + (place.pop(name, None) or [])
    for name, values in (choice.pop("logprobs", None) or {}).items():
        if isinstance(values, list):
            said[f"logprobs.{name}"] += rounded(json.dumps(values))


def number_again() -> None:
    """From now on prompts are those of a fresh process."""
    global _numbers
    _numbers = count()


def body_of(path: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A request with a prompt that no server has seen."""
    number = next(_numbers)
    body: dict[str, Any] = {"model": cluster.MODEL_NAME, "max_tokens": 16, "temperature": 0.0}
    if path == COMPLETIONS:
        body["prompt"] = (
            f"{number} times around the world and back again, and then once more {number}"
        )
    else:
        body["messages"] = [
            {"role": "system", "content": f"Answer question {number} shortly, and be kind."},
            {"role": "user", "content": f"What is half of the square of {number}"},
        ]
    return {**body, "stream": True, **changes}


def spoken(plain: Server, path: str, changes: Mapping[str, Any], but: str = "") -> dict[str, Any]:
    """A request whose answer begins with a letter or a figure, none of *but*: half of what the tiny
    model says is no text at all."""
    for _ in range(NUM_TRIES):
        body = body_of(path, changes)
        first = first_word(plain, path, body)
        if re.fullmatch("[0-9A-Za-z]", first) and first not in but:
            return body
    raise AssertionError(f"none of {NUM_TRIES} answers begins with a letter or a figure")


def first_word(plain: Server, path: str, body: Mapping[str, Any]) -> str:
    """The text of an answer's first token."""
    one = {**body, "stream": False, "max_tokens": 1, "stream_options": None}
    (choice,) = parity.post(f"{plain.url}{path}", one).json()["choices"]
    message = choice if path == COMPLETIONS else choice["message"]
    return "".join(message.get(name) or "" for name in _TEXTS)


def check_source(added: Metrics, way: str) -> None:
    """One first token came in a way; one that comes later than its prompt, as on a busy
    machine, is the decode server's own."""
    late = added.total(FIRST_TOKENS, way="not_offered") if way == "prefill" else 0
    counted = {one: count for one, count in added.samples.items() if one[0] == FIRST_TOKENS}
    message = f"expected one by {way}, got {counted}"
    assert added.total(FIRST_TOKENS, way=way) + late == added.total(FIRST_TOKENS) == 1, message
