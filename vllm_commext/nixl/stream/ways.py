"""In which mode a request's KV cache is handed over: by chunks or whole, and why whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.geometry.request_blocks import keeps_every_token
from vllm_commext.nixl.stream.rows import Region, regions_of

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
WAYS = (STREAMED, NO_KEY, OFF, LAYERS, HOST_COPY, ZEROED, NO_ROOM, REPEATED_KEY, PROMPT, NOT_FOUND)
"""By chunks; or whole, as its router gave no key, as this engine does not stream for one of the
reasons in ``REFUSALS``, as all rows are taken or the prompt does not fit one, as another request
has or had the key, as the prompt is of a kind that cannot be compared ahead; or, on a decode
engine, not at all, as its prefill engine did not begin with the key, or does not stream it."""
REFUSALS = {
    OFF: "this engine does not do: set stream_chunks in its kv_connector_extra_config",
    LAYERS: "is not done for models of which no layer's blocks all stay until the end",
    HOST_COPY: "is not done with a copy of the cache in host memory",
    ZEROED: "is not done for models whose blocks vLLM zeroes before it uses them, where all of "
    "these stay until the end",
}


@dataclass(frozen=True)
class Streaming:
    """What an engine does of chunk streaming.

    Attributes:
        refusal: why it does nothing of it, one of ``REFUSALS``; "" where it does.
        groups: the cache's groups, in the order of a request's lists of blocks.
        max_tokens: of the longest prompt.
        chunk_tokens: tokens that a step computes at most.
    """

    refusal: str = OFF
    groups: tuple[Group, ...] = ()
    max_tokens: int = 0
    chunk_tokens: int = 0

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Where each group's block ids stand in a row."""
        return regions_of(self.groups, self.max_tokens)

    @property
    def pieces_per_row(self) -> int:
        """Of block ids; 0 where it does nothing of it."""
        return sum(one.num_pieces for one in self.regions)


def refusal_of(
    groups: Sequence[Group], *, is_on: bool, keeps_host_copy: bool, zeroes_blocks: bool
) -> str:
    """Why an engine with these groups of blocks does not stream, "" where it does."""
    if not is_on:
        return OFF
    if all(group.kind != FULL for group in groups):
        return LAYERS
    if keeps_host_copy:
        return HOST_COPY
    # Zeroing comes before the fence is replaced: only a read that follows the prompt's end, as that
    # of a state does, proves that none of the blocks was taken away before.
    return ZEROED if zeroes_blocks and keeps_every_token(groups) else ""
