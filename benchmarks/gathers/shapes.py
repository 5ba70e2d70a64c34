"""What is read: caches of models, and a request's blocks in them."""

from dataclasses import dataclass

import torch

from vllm_commext.nixl.geometry.layout import (
    FULL,
    STATE,
    TOKENS,
    AttentionGeometry,
    CacheLayout,
    Family,
    Group,
    StateGeometry,
    StatePart,
)

X_PART, B_PART, SSM_PART = 18 << 10, 768, 3 << 19
"""Bytes of a state's parts in the whole model: 48 heads; one group; 48 heads."""
NUM_HEADS, STATE_HEADS, TOKEN_BYTES = 8, 48, 512


@dataclass(frozen=True)
class Shape:
    """What a load reads.

    Attributes:
        layers: with attention, side by side in a block.
        states: layers with a state, each apart.
        blocks: attention blocks of one load.
        block_tokens: of a block.
        loads: at a time.
    """

    name: str
    layers: int
    states: int
    blocks: int
    block_tokens: int
    loads: int = 1

    def attention_bytes(self, tp_size: int) -> int:
        """Of a layer of a block in one rank."""
        return NUM_HEADS // tp_size * self.block_tokens * TOKEN_BYTES

    def state_bytes(self, tp_size: int) -> int:
        return -(-(X_PART // tp_size + B_PART + SSM_PART // tp_size) // 512) * 512

    def num_blocks(self) -> int:
        return self.blocks * self.loads

    def sizes(self, tp_size: int) -> tuple[int, int]:
        """Bytes of all attention layers and of one layer's states in one rank."""
        blocks = self.num_blocks()
        return (
            blocks * self.layers * self.attention_bytes(tp_size),
            blocks * self.state_bytes(tp_size) if self.states else 0,
        )

    def num_bytes(self, tp_size: int) -> int:
        attention, states = self.sizes(tp_size)
        return attention + self.states * states

    def layout(self, address: int, tp_size: int, tp_rank: int) -> CacheLayout:
        """The cache of one rank at this address: attention, then each layer's states."""
        size = self.attention_bytes(tp_size)
        attention = AttentionGeometry(
            num_rows=self.num_blocks(),
            rows_per_block=1,
            row_stride=self.layers * size,
            row_tokens=self.block_tokens,
            num_heads=NUM_HEADS,
            replicated=False,
            num_planes=1,
            head_stride=self.block_tokens * TOKEN_BYTES,
            token_stride=TOKEN_BYTES,
            token_bytes=TOKEN_BYTES,
            content=TOKENS,
            dtype="bfloat16",
        )
        names = [f"a{layer:02}" for layer in range(self.layers)]
        bases = [address + layer * size for layer in range(self.layers)]
        groups, families = [Group(FULL, self.block_tokens)], [Family(0, names, bases, attention)]
        if self.states:
            x, heads = X_PART // tp_size, STATE_HEADS
            parts = (
                StatePart("x", "bfloat16", 0, heads, False, X_PART // heads),
                StatePart("B", "bfloat16", x, 1, True, B_PART),
                StatePart("ssm", "float32", x + B_PART, heads, False, SSM_PART // heads),
            )
            states = StateGeometry(self.num_blocks(), self.state_bytes(tp_size), parts)
            first, apart = self.sizes(tp_size)
            names = [f"s{layer:02}" for layer in range(self.states)]
            bases = [address + first + layer * apart for layer in range(self.states)]
            groups.append(Group(STATE, 1 << 30))
            families.append(Family(1, names, bases, states))
        return CacheLayout(tp_size, tp_rank, self.num_blocks(), groups, families)

    def block_ids(self, load: int, seed: int) -> list[list[int]]:
        """A load's blocks, a list a group, scattered over the cache."""
        order = torch.randperm(
            self.num_blocks(), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        mine = order[load * self.blocks : (load + 1) * self.blocks]
        return [mine, mine[:1]] if self.states else [mine]


SHAPES = {
    "cuda": (
        Shape("8B, TP 2 to TP 1, 8,000 tokens", 32, 0, 500, 16),
        Shape("8B, TP 2 to TP 1, 4,000 tokens", 32, 0, 250, 16),
        Shape("8B, TP 2 to TP 1, 4 x 2,000 tokens", 32, 0, 125, 16, loads=4),
        Shape("8B, TP 2 to TP 1, 64 tokens", 32, 0, 4, 16),
        Shape("hybrid, TP 2 to TP 1, 20 blocks", 4, 36, 20, 384),
        Shape("hybrid, TP 2 to TP 1, 4 x 20 blocks", 4, 36, 20, 384, loads=4),
    ),
    "cpu": (
        Shape("tiny, TP 2 to TP 1", 4, 0, 40, 16),
        Shape("tiny hybrid, TP 2 to TP 1", 8, 26, 2, 16, loads=2),
    ),
}
