"""Whether an engine reuses blocks across engines, and why not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.stream.ways import HOST_COPY, LAYERS, OFF, ZEROED

SPECULATION = "speculation"
DIFFUSION = "diffusion"
POOL = "pool"
STEPS = "steps"
FREES = "frees"
REFUSALS = {
    LAYERS: "this model's blocks do not all stay in one group until the end",
    HOST_COPY: "a copy of the cache is kept in host memory",
    ZEROED: "vLLM zeroes this model's blocks before it uses them",
    SPECULATION: "drafts have a KV cache of their own, which is not complete for the last tokens",
    DIFFUSION: "an answer may come of a last denoising step, whose KV no pass has computed anew",
    POOL: "this vLLM's block pool does not tell when a block is used again, as 0.32 and newer do",
    STEPS: "the engine's step is left as it is, so that failed reads could not be computed here",
    FREES: "this vLLM cannot be told to keep blocks that a step under way may still write to",
}
"""Why an engine that was asked to does not."""


@dataclass(frozen=True)
class Reusing:
    """What an engine does of reuse.

    Attributes:
        refusal: why it does nothing of it, ``OFF`` or one of ``REFUSALS``; "" where it does.
        block_size: tokens of a block.
        max_blocks: blocks of the longest prompt.
        configuration: gives the digest of the facts on which engines must agree.
    """

    refusal: str = OFF
    block_size: int = 0
    max_blocks: int = 0
    configuration: Callable[[], str] = field(default=str, compare=False)


def refusal_of(
    groups: Sequence[Group], *, is_on: bool, keeps_host_copy: bool, zeroes_blocks: bool
) -> str:
    """Why an engine with these groups of blocks reuses none, "" where nothing is known yet."""
    if not is_on:
        return OFF
    if len(groups) != 1 or groups[0].kind != FULL:
        return LAYERS
    if keeps_host_copy:
        return HOST_COPY
    return ZEROED if zeroes_blocks else ""
