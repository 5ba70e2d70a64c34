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

    from vllm_commext.nixl.requests import RemoteRequest

PARTS = {
    "tokens": "token ids",
    "embeddings": "prompt embeddings",
    "lora": "LoRA adapter",
    "cache_salt": "cache_salt",
    "multimodal": "multimodal items",
    "weights": "weights, which were changed since the start of an engine",
    "files": "weight files",
}
"""Every part of a prompt, and what messages call it."""
COMPUTED_BY = frozenset({"lora", "weights", "files"})  # parts of the engine that computes it
DIGEST_DIGITS = 64


class OtherPromptError(ProtocolError):
    """The KV cache is that of another prompt."""


class OtherWeightsError(OtherPromptError):
    """The KV cache is the prompt's own, computed with another adapter or other weights; ``remote``
    can be told that it is not read."""

    remote: RemoteRequest | None = None


@dataclass(frozen=True)
class Prompt:
    """One request's prompt.

    Attributes:
        num_tokens: its tokens, embeddings counted as one each.
        embeddings: [num_tokens, hidden size] or None.
        is_token: of each position whether the token id counts, not the embedding; None where all of
            the prompt is of one kind.
        items: multimodal items in the order of their places: (hash of the content, first token,
            tokens).
        lora: name and content of its adapter, "" for none; see ``identity``.
        weights: generation of the engine's weights, "" for those of its start.
        files: digest of the weight files that the engine started with.
    """

    num_tokens: int
    token_ids: list[int] | None
    embeddings: torch.Tensor | None = None
    is_token: Sequence[bool] | None = None
    lora: str = ""
    cache_salt: str = ""
    items: tuple[tuple[str, int, int], ...] = ()
    weights: str = ""
    files: str = ""


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
    for part in ("lora", "cache_salt", "weights", "files"):
        if text := getattr(prompt, part):
            found[part] = _digest(text.encode(errors="surrogatepass"))
    items = [item for item in prompt.items if item[1] < num_tokens]
    if items:
        found["multimodal"] = _digest(msgspec.msgpack.encode(items))
    return found


def check_prompt(own: Mapping[str, str], computed: Mapping[str, str], source: str) -> None:
    """Compare the digests of a request's prompt and of a KV cache; raises OtherPromptError."""
    differing = [part for part in PARTS if own.get(part) != computed.get(part)]
    if not differing and own.keys() <= PARTS.keys() and computed.keys() <= PARTS.keys():
        return
    names = ", ".join(PARTS[part] for part in differing) or "parts than are known here"
    kind, remedy = OtherPromptError, "mix requests up, or do the engines tokenise or template"
    remedy = f"Does the router {remedy} differently?"
    if differing and COMPUTED_BY.issuperset(differing):
        kind, remedy = OtherWeightsError, "Load the same adapters and weights on both engines."
    raise kind(
        f"kv_transfer_params are those of another prompt: {source} computed it with other {names}. "
        f"{remedy}"
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
