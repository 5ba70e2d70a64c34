"""What the official ``openai`` client asks of a server, in each of its ways, and what it makes of
the answer but for names and times that a server makes up. It is imported by what asks: every
process of a run collects this file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import BaseModel

from tests.kit import cluster
from tests.kit.parity import tls

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

MADE_UP = {"id", "created", "created_at", "completed_at", "system_fingerprint", "item_id"}
NUM_PIECES = 3
LIMITS: Mapping[str, Any] = {"model": cluster.MODEL_NAME, "max_tokens": 16, "temperature": 0.0}


class Paint(BaseModel):
    in_red: bool


def _told(answer: Any) -> Any:
    if isinstance(answer, BaseModel):
        answer = answer.model_dump(warnings=False)
    if isinstance(answer, dict):
        return {name: _told(value) for name, value in answer.items() if name not in MADE_UP}
    if isinstance(answer, list):
        return [_told(value) for value in answer]
    return answer


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def _tool(name: str = "paint") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": Paint.model_json_schema()}}


FORCED = {"tools": [_tool()], "tool_choice": {"type": "function", "function": {"name": "paint"}}}


def _chat(client: OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(messages=_user(text), **{**LIMITS, **more})


def _joined(chunks: Sequence[Any]) -> Any:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or []]
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    return {
        "text": "".join(delta.content or "" for delta in deltas),
        "calls": [call.name for call in calls if call.name],
        "arguments": "".join(call.arguments or "" for call in calls),
        "ends": [end for end in ends if end],
        "usage": [_told(chunk.usage) for chunk in chunks if chunk.usage],
    }


def _streamed(client: OpenAI, text: str, **more: Any) -> Any:
    options = {"include_usage": True}
    return _joined(list(_chat(client, text, stream=True, stream_options=options, **more)))


def _parsed(client: OpenAI, text: str) -> Any:
    answer = client.chat.completions.parse(
        messages=_user(text), response_format=Paint, **{**LIMITS, "max_tokens": 64}
    )
    return _told(answer)


def _responded(client: OpenAI, text: str) -> Any:
    return _told(
        client.responses.create(
            model=cluster.MODEL_NAME, input=text, max_output_tokens=16, temperature=0.0
        ).output
    )


def _responded_in_a_stream(client: OpenAI, text: str) -> Any:
    events = client.responses.create(
        model=cluster.MODEL_NAME, input=text, max_output_tokens=16, temperature=0.0, stream=True
    )
    found = list(events)
    return "".join(one.delta for one in found if one.type == "response.output_text.delta")


def _left(client: OpenAI, text: str) -> Any:
    with closing(_chat(client, text, stream=True, max_tokens=200)) as chunks:
        pieces = [chunk for chunk, _ in zip(chunks, range(NUM_PIECES), strict=False)]
    return len(pieces), _told(_chat(client, text[::-1]))


def _of_another_model(client: OpenAI, text: str) -> Any:
    return _told(_chat(client, text, model="another"))


def _too_long(client: OpenAI, text: str) -> Any:
    return _told(_chat(client, text, max_tokens=cluster.MAX_MODEL_LEN))


async def _three_at_once(client: AsyncOpenAI, text: str) -> Any:
    async def streamed() -> Any:
        chunks = await client.chat.completions.create(
            messages=_user(f"streamed {text}"), stream=True, **LIMITS
        )
        return _joined([chunk async for chunk in chunks])

    def whole(asked: str) -> Any:
        return client.chat.completions.create(messages=_user(asked), **LIMITS)

    one, other, pieces = await asyncio.gather(whole(text), whole(f"again {text}"), streamed())
    return _told(one), _told(other), pieces


CASES: dict[str, Callable[[OpenAI, str], Any]] = {
    "models": lambda client, _: [one.id for one in client.models.list()],
    "a completion": lambda client, text: _told(
        client.completions.create(prompt=text, echo=True, **LIMITS)
    ),
    "a chat": lambda client, text: _told(_chat(client, text)),
    "a stream": _streamed,
    "a tool": lambda client, text: _told(_chat(client, text, max_tokens=64, **FORCED)),
    "a tool in a stream": lambda client, text: _streamed(client, text, max_tokens=64, **FORCED),
    "structured output": _parsed,
    "a response": _responded,
    "a response in a stream": _responded_in_a_stream,
    "a client that leaves": _left,
    "another model": _of_another_model,
    "too many tokens": _too_long,
}


def ask(url: str, case: str, text: str) -> Any:
    from openai import OpenAI, OpenAIError

    try:
        with httpx.Client(verify=tls(), trust_env=False) as http:
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
            return CASES[case](client, text)
    except OpenAIError as error:
        return type(error).__name__, getattr(error, "status_code", None), str(error)


def ask_at_once(url: str, text: str) -> Any:
    from openai import AsyncOpenAI

    async def asked() -> Any:
        async with httpx.AsyncClient(verify=tls(), trust_env=False) as http:
            base = f"{url}/v1"
            client = AsyncOpenAI(base_url=base, api_key="none", max_retries=0, http_client=http)
            return await _three_at_once(client, text)

    return asyncio.run(asked())
