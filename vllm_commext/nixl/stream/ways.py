"""In which mode a request's KV cache is handed over: by chunks or whole, and why whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_commext.nixl.geometry.layout import FULL, Group

STREAMED = "streamed"
NO_KEY = "no_key"
OFF = "off"
LAYERS = "layers"
HOST_COPY = "host_copy"
ZEROED = "zeroed"
NO_ROOM = "no_room"
REPEATED_KEY = "repeated_key"
PROMPT = "prompt"
NOT_FOUND = "not_found"
WAYS = (
    STREAMED,
    NO_KEY,
    OFF,
    LAYERS,
    HOST_COPY,
    ZEROED,
    NO_ROOM,
    REPEATED_KEY,
    PROMPT,
    NOT_FOUND,
)
"""By chunks; or whole, as its router gave no key, as this engine does not stream for one of the
reasons in ``REFUSALS``, as all rows are taken or the prompt does not fit one, as another request
has or had the key, as the prompt is of a kind that cannot be compared ahead; or, on a decode
engine, not at all, as its prefill engine did not begin with the key, or does not stream it."""
REFUSALS = {
    OFF: "this engine does not do: set stream_chunks in its kv_connector_extra_config",
    LAYERS: "is not done for models whose blocks do not all stay in one group until the end",
    HOST_COPY: "is not done with a copy of the cache in host memory",
    ZEROED: "is not done for models whose blocks vLLM zeroes before it uses them",
}


@dataclass(frozen=True)
class Streaming:
    """What an engine does of chunk streaming.

    Attributes:
        refusal: why it does nothing of it, one of ``REFUSALS``; "" where it does.
        block_size: tokens of a block.
        max_blocks: blocks of the longest prompt.
        chunk_tokens: tokens that a step computes at most.
    """

    refusal: str = OFF
    block_size: int = 0
    max_blocks: int = 0
    chunk_tokens: int = 0


def refusal_of(
    groups: Sequence[Group], *, is_on: bool, keeps_host_copy: bool, zeroes_blocks: bool
) -> str:
    """Why an engine with these groups of blocks does not stream, "" where it does."""
    if not is_on:
        return OFF
    if len(groups) != 1 or groups[0].kind != FULL:
        return LAYERS
    if keeps_host_copy:
        return HOST_COPY
    return ZEROED if zeroes_blocks else ""
