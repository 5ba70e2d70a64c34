"""Conversations of the load, by every endpoint that has them, whose right texts are known."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.judge import NOISE_NATS
from tests.kit.cluster import MODEL_NAME
from tests.kit.parity import CompletionError, lines_of, post, stream
from tests.kit.prompts import CHAT_TEMPLATE
from vllm_commext.errors import ProtocolError

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WORDS = ("a", "blue", "whale", "of", "seven", "seas", "and", "the", "northern", "wind", "sings")
NUM_WORDS = range(8, 40)
CALL_TOKENS = 120
"""So that each call comes to its end: of half a one a stream shows less than a whole answer."""
REFERENCE_SECONDS = 60.0
DONE = "[DONE]"
ENDS = (DONE, "message_stop", "response.completed", "response.incomplete")
FAILURES = ("error", "response.failed")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}
PARSER = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CALL = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}


def write_options(folder: Path) -> list[str]:
    """Options of engines that take part; the template of their chats is written into *folder*."""
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    return ["--chat-template", str(template), *PARSER]


@dataclass(frozen=True)
class Talk:
    """A conversation: its request without ``stream``, and the text of its right answer."""

    path: str
    body: Mapping[str, Any]
    text: str = ""

    def is_right(self, text: str) -> bool:
        """True for the right text. Of a call's arguments vLLM shows a stream what was generated,
        and a whole answer the value of that, written anew."""
        return text == self.text or ("tools" in self.body and _value(text) == _value(self.text))

    def ask(self, url: str, seconds: float) -> str:
        """The text of a streamed answer.

        Raises:
            CommextError, httpx.HTTPError: there is none, or not all of it."""
        body = {**self.body, "stream": True}
        with stream(f"{url}{self.path}", body, timeout_seconds=seconds) as answer:
            if answer.status_code != 200:
                raise CompletionError(url, answer.status_code, answer.read().decode())
            return "".join(_texts_of_stream(url, lines_of(answer.iter_text())))

    def ask_whole(self, url: str, seconds: float) -> str:
        return "".join(_texts(post(f"{url}{self.path}", self.body, seconds).json()))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _texts_of_stream(url: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        event = {"type": DONE} if payload == DONE else json.loads(payload)
        if event.get("error") or event.get("type") in FAILURES:
            raise CompletionError(url, 500, payload)
        if event.get("type") in ENDS:
            return
        yield from _texts(event)
    raise ProtocolError(f"expected the stream of {url} to come to an end, but it broke off")


def _texts(part: Mapping[str, Any]) -> Iterator[str]:
    """All that a client is shown of an answer, or of one event of a stream."""
    for choice in part.get("choices", ()):
        said = choice.get("delta") or choice.get("message") or {}
        yield said.get("content") or ""
        calls = said.get("tool_calls") or ()
        yield from (call["function"].get("arguments") or "" for call in calls)
    if part.get("type") == "response.output_text.delta":
        yield part["delta"]
    elif part.get("type") == "content_block_delta":
        yield part["delta"].get("text") or part["delta"].get("partial_json") or ""
    for item in part.get("output", ()):
        yield from (piece.get("text", "") for piece in item.get("content") or ())
    yield from (piece.get("text", "") for piece in part.get("content", ()))


def take_talks(url: str, number: int, num_tokens: int, seed: int, model: str = "") -> list[Talk]:
    """Conversations in all forms with the answers of a server that computes everything itself.

    Those in which two tokens are about equally likely somewhere are left out, as batches of other
    sizes round otherwise, and those of which that server's own stream shows less."""
    rng = random.Random(seed)
    found: list[Talk] = []
    while len(found) < number:
        words = " ".join(rng.choice(WORDS) for _ in range(rng.choice(NUM_WORDS)))
        messages = [{"role": "user", "content": f"{words} {rng.randrange(10_000)}"}]
        name = model if model and len(found) % 2 else MODEL_NAME
        common = {"model": name, "temperature": 0.0}
        chat = {**common, "messages": messages, "max_tokens": num_tokens}
        asked = [
            (CHAT, {**chat, **CALL, "max_tokens": CALL_TOKENS}),
            (MESSAGES, chat),
            (RESPONSES, {**common, "input": messages, "max_output_tokens": num_tokens}),
        ]
        for path, body in asked if _is_clear(url, chat) else ():
            talk = Talk(path, body, Talk(path, body).ask_whole(url, REFERENCE_SECONDS))
            if talk.is_right(talk.ask(url, REFERENCE_SECONDS)):
                found.append(talk)
    return found


def _is_clear(url: str, chat: Mapping[str, Any]) -> bool:
    body = {**chat, "logprobs": True, "top_logprobs": 2}
    (choice,) = post(f"{url}{CHAT}", body).json()["choices"]
    tops = (one["top_logprobs"] for one in choice["logprobs"]["content"])
    return all(first["logprob"] - second["logprob"] > NOISE_NATS for first, second in tops)
