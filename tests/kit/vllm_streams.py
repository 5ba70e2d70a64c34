"""Streams as vLLM 0.32 writes them, for tests of what reads them: any tokens in any events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Stream:
    """One answer: id and text of each token, usage "" for none, "last", or "each" event's."""

    tokens: Sequence[tuple[int, str]]
    request_id: str = "r"
    created: int = 1_700_000_000
    is_chat: bool = False
    usage: str = ""
    with_ids: bool = False
    finish_reason: str = "length"
    model: str = "tiny"
    prompt: Sequence[int] = (5, 6, 7)

    def events(self, sizes: Sequence[int]) -> list[bytes]:
        """One event for as many tokens as each of *sizes* says, and those around them."""
        assert sum(sizes) == len(self.tokens)
        written, start = ([self._role()] if self.is_chat else []), 0
        for number, size in enumerate(sizes):
            written.append(self._tokens(start, start + size, number == len(sizes) - 1))
            start += size
        if self.usage:
            written.append(self._event([], usage=self._counts(start)))
        return [*written, DONE]

    def prefill_answer(self) -> dict[str, Any]:
        token, text = self.tokens[0]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "reasoning": None}
        else:
            choice["text"] = text
        answer: dict[str, Any] = {"id": "p", "model": self.model}
        answer |= {"choices": [choice], "usage": self._counts(1)}
        if self.with_ids:
            (answer if self.is_chat else choice)["prompt_token_ids"] = list(self.prompt)
        params = {"do_remote_prefill": True, "remote_first_token": token}
        return {**answer, "kv_transfer_params": params}

    def _role(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        ids = {"prompt_token_ids": list(self.prompt) if self.with_ids else None}
        return self._event([{**choice, "finish_reason": None}], **ids, **self._usage(0))

    def _tokens(self, start: int, end: int, is_last: bool) -> bytes:
        text = "".join(text for _, text in self.tokens[start:end])
        ids = [token for token, _ in self.tokens[start:end]] if self.with_ids else None
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        finish_reason = self.finish_reason if is_last else None
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        if not self.is_chat:
            is_first = self.with_ids and start == 0
            choice["prompt_token_ids"] = list(self.prompt) if is_first else None
        return self._event([{**choice, "token_ids": ids}], **self._usage(end))

    def _usage(self, count: int) -> dict[str, Any]:
        return {"usage": self._counts(count)} if self.usage == "each" else {}

    def _counts(self, count: int) -> dict[str, int]:
        num_prompt = len(self.prompt)
        return {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + count,
            "completion_tokens": count,
        }

    def _event(self, choices: list[Any], **others: Any) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        name = ("chatcmpl-" if self.is_chat else "cmpl-") + self.request_id
        content = {"id": name, "object": kind, "created": self.created, "model": self.model}
        text = json.dumps(
            {**content, "choices": choices, **others}, ensure_ascii=False, separators=(",", ":")
        )
        return b"data: " + text.encode() + b"\n\n"
