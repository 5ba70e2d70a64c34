"""Whether an engine reuses blocks across engines, and why not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.reasons import NoReuse


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


def refusal_of(
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
