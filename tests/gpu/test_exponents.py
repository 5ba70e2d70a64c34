"""The code for bfloat16 on a GPU: the same parts as on a CPU, and all words come back."""

import numpy as np
import pytest
import torch

from tests.kit.gpu_checks import needs_gpus
from vllm_commext.nixl.gathered.exponents import (
    BLOCK,
    BLOCK_BYTES,
    decode,
    encode,
    num_blocks,
    packed_bytes,
)

pytestmark = needs_gpus(1)
COUNTS = (BLOCK, 3 * BLOCK - 8, 2500 * BLOCK + 64)
"""Words: a block, some with the last one not whole, more than are coded in one step."""
SPREADS = (0.0, 1e-38, 1.0)


def words(count: int, spread: float) -> torch.Tensor:
    """Of normal numbers, with infinities, and what is not a number, between them."""
    dice = np.random.default_rng(count)
    numbers = (dice.standard_normal(count) * spread).astype(np.float32)
    drawn = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    drawn[dice.integers(0, count, count // 200)] = 0x7FC1
    kept = np.zeros(num_blocks(2 * count) * BLOCK_BYTES // 2, np.uint16)
    kept[:count] = drawn
    return torch.from_numpy(kept.view(np.uint8))


def packed(source: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, int]:
    target = torch.zeros_like(source)
    *_, level = encode(source, target, num_bytes)
    return target, level


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("spread", SPREADS)
def test_parts_are_those_of_a_cpu_and_words_come_back(count: int, spread: float) -> None:
    source, num_bytes = words(count, spread), 2 * count
    part, level = packed(source, num_bytes)
    on_gpu, gpu_level = packed(source.cuda(), num_bytes)
    assert gpu_level == level
    length = packed_bytes(num_blocks(num_bytes), level)
    back = torch.zeros_like(source, device="cuda")
    for _ in decode(on_gpu[:length], back, num_bytes, level):
        pass
    assert torch.equal(back[:num_bytes].cpu(), source[:num_bytes])
    assert torch.equal(on_gpu[:length].cpu(), part[:length])
