"""Whether an engine streams by chunks, and what its streams need."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.geometry.request_blocks import keeps_every_token
from vllm_commext.nixl.reasons import Handover
from vllm_commext.nixl.stream.rows import Region, regions_of


@dataclass(frozen=True)
class Streaming:
    """What an engine does of chunk streaming.

    Attributes:
        refusal: why it does nothing of it, None where it does.
        groups: the cache's groups, in the order of a request's lists of blocks.
        max_tokens: of the longest prompt.
        chunk_tokens: tokens that a step computes at most.
    """

    refusal: Handover | None = Handover.OFF
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
) -> Handover | None:
    """Why an engine with these groups of blocks does not stream, None where it does."""
    if not is_on:
        return Handover.OFF
    if all(group.kind != FULL for group in groups):
        return Handover.LAYERS
    if keeps_host_copy:
        return Handover.HOST_COPY
    # Zeroing comes before the fence is replaced: only a read that follows the prompt's end, as that
    # of a state does, proves that none of the blocks was taken away before.
    return Handover.ZEROED if zeroes_blocks and keeps_every_token(groups) else None
