"""Whether an engine streams prompts by chunks and reuses blocks across engines, why not, and what
that needs to know of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.geometry.request_blocks import keeps_every_token
from vllm_commext.nixl.reasons import Handover, NoReuse
from vllm_commext.nixl.stream.progress import Region, regions_of


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


def streaming_refusal(
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


@dataclass(frozen=True)
class Reusing:
    """What an engine does of reuse.

    Attributes:
        refusal: why it does nothing of it, None where it does.
        block_size: tokens of a block.
        max_blocks: blocks of the longest prompt.
        configuration: gives the digest of the facts on which engines must agree.
    """

    refusal: NoReuse | None = NoReuse.OFF
    block_size: int = 0
    max_blocks: int = 0
    configuration: Callable[[], str] = field(default=str, compare=False)


def reuse_refusal(
    groups: Sequence[Group], *, is_on: bool, keeps_host_copy: bool, zeroes_blocks: bool
) -> NoReuse | None:
    """Why an engine with these groups of blocks reuses none, None where nothing is known yet."""
    if not is_on:
        return NoReuse.OFF
    if len(groups) != 1 or groups[0].kind != FULL:
        return NoReuse.LAYERS
    if keeps_host_copy:
        return NoReuse.HOST_COPY
    return NoReuse.ZEROED if zeroes_blocks else None
