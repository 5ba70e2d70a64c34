"""Digests of what a prompt's KV cache depends on: a prefill engine returns them, and a decode
engine compares them with its own; one for each part, so that a refusal names what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_commext.errors import ProtocolError

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

PARTS = {
    "tokens": "token ids",
    "embeddings": "prompt embeddings",
    "lora": "LoRA adapter",
    "cache_salt": "cache_salt",
    "multimodal": "multimodal items",
}
"""Every part of a prompt, and what messages call it."""
DIGEST_DIGITS = 64


class OtherPromptError(ProtocolError):
    """The KV cache is that of another prompt."""


@dataclass(frozen=True)
class Prompt:
    """One request's prompt.

    Attributes:
        num_tokens: its tokens, embeddings counted as one each.
        token_ids: one a token; None where all of it is embeddings.
        embeddings: [num_tokens, hidden size] or None.
        is_token: of each position whether the token id counts, not the embedding; None where all of
            the prompt is of one kind.
        items: multimodal items in the order of their places: (hash of the content, first token,
            tokens).
    """

    num_tokens: int
    token_ids: list[int] | None
    embeddings: torch.Tensor | None = None
    is_token: Sequence[bool] | None = None
    lora: str = ""
    cache_salt: str = ""
    items: tuple[tuple[str, int, int], ...] = ()


def prompt_of(request: Request) -> Prompt:
    lora = request.lora_request
    places = [(item.identifier, item.mm_position) for item in request.mm_features]
    return Prompt(
        num_tokens=request.num_prompt_tokens,
        token_ids=request.prompt_token_ids,
        embeddings=request.prompt_embeds,
        is_token=getattr(request, "prompt_is_token_ids", None),  # vLLM before it mixed the two
        lora=lora.lora_name if lora is not None else "",
        cache_salt=request.cache_salt or "",
        items=tuple((name, place.offset, place.length) for name, place in places),
    )


def digests(prompt: Prompt, num_tokens: int) -> dict[str, str]:
    """SHA-256, hexadecimal, of each part that the first ``num_tokens`` of the prompt have.

    A multimodal item counts from its first token on, since its content decides all of its tokens.
    """
    found: dict[str, str] = {}
    if prompt.token_ids is not None:
        # One call for all ids; those of 100,000 tokens take a millisecond, one by one take twenty.
        whole = num_tokens == len(prompt.token_ids)
        ids = prompt.token_ids if whole else prompt.token_ids[:num_tokens]
        found["tokens"] = _digest(msgspec.msgpack.encode(ids))
    if prompt.embeddings is not None:
        found["embeddings"] = _digest_of_rows(prompt, num_tokens)
    if prompt.lora:
        found["lora"] = _digest(prompt.lora.encode(errors="surrogatepass"))
    if prompt.cache_salt:
        found["cache_salt"] = _digest(prompt.cache_salt.encode(errors="surrogatepass"))
    items = [item for item in prompt.items if item[1] < num_tokens]
    if items:
        found["multimodal"] = _digest(msgspec.msgpack.encode(items))
    return found


def check_prompt(own: Mapping[str, str], computed: Mapping[str, str], source: str) -> None:
    """Compare the digests of a request's prompt and of a KV cache; raises OtherPromptError."""
    differing = [name for part, name in PARTS.items() if own.get(part) != computed.get(part)]
    if differing or not own.keys() <= PARTS.keys() or not computed.keys() <= PARTS.keys():
        raise OtherPromptError(
            f"kv_transfer_params are those of another prompt: {source} computed it with other "
            f"{', '.join(differing) or 'parts than are known here'}. Does the router mix requests "
            "up, or do the engines tokenise, template or name adapters differently?"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_rows(prompt: Prompt, num_tokens: int) -> str:
    import torch

    assert prompt.embeddings is not None
    rows = prompt.embeddings[:num_tokens].contiguous().cpu()
    about: list[Any] = [list(rows.shape), str(rows.dtype)]
    if prompt.is_token is not None:
        about.append(list(prompt.is_token[:num_tokens]))
    content = hashlib.sha256(msgspec.msgpack.encode(about))
    content.update(rows.view(torch.uint8).numpy().data)
    return content.hexdigest()
