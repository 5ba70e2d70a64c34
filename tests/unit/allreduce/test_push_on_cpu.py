"""The push kernels on a CPU, rank beside rank: sums, order, and the reuse of staging memory."""

import random

import pytest
import torch

from tests.kit.host_kernels import COMPILER
from tests.unit.allreduce.push_emulation import Ranks, in_order_of_ranks, random_calls
from vllm_commext.gpu.ipc import EMPTY

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")

KIB = 1 << 10
CASES = [  # every form of the kernels, and every element type in each
    *((2, torch.float32), (2, torch.float16), (2, torch.bfloat16)),
    *((4, torch.bfloat16), (5, torch.float16)),
]
LONG = [pytest.param(few, torch.float32, marks=pytest.mark.long) for few in (3, 6, 7, 8)]


@pytest.mark.parametrize(("world_size", "dtype"), [*CASES, *LONG], ids=str)
def test_all_ranks_get_the_sum_in_the_order_of_ranks(world_size: int, dtype: torch.dtype) -> None:
    """To the bit, so that a row's bits depend on no other row."""
    numbers = random.Random(world_size)
    # From one pack, of which most ranks sum none, to several rounds of the blocks there are.
    sizes = [1, 33, 129, 1000, 1, 4096, 2, *(numbers.randrange(1, 3000) for _ in range(3))]
    ranks = Ranks(world_size, 96 * KIB)
    inputs = random_calls(world_size, dtype, sizes, seed=world_size)
    outputs = ranks.all_reduce(inputs, most_blocks=3, seed=world_size)
    for call in range(len(sizes)):
        want = in_order_of_ranks([of[call] for of in inputs])
        for rank in range(world_size):
            assert torch.equal(outputs[rank][call], want), (call, rank)
    assert [state.tolist() for state in ranks.states] == [[len(sizes), 0]] * world_size
    assert all((memory == EMPTY).all() for memory in ranks.memories)


@pytest.mark.parametrize(("world_size", "dtype"), CASES, ids=str)
def test_every_bit_pattern_passes(world_size: int, dtype: torch.dtype) -> None:
    """The words that mean "nothing yet" among them: they come out as the NaNs that they are."""
    words = [0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0, 0xFFFF0000, 0x0000FFFF, 0x7F800000, 0xFF80FF80]
    raw = torch.tensor(words * 64, dtype=torch.int64).to(torch.int32).view(dtype)
    zeros = torch.zeros_like(raw)
    inputs = [
        [raw if source == rank else zeros for source in range(world_size)] * 2
        for rank in range(world_size)
    ]
    outputs = Ranks(world_size, 4 * KIB).all_reduce(inputs, most_blocks=2, seed=3)
    for call in range(world_size):
        for rank in range(world_size):
            assert torch.equal(outputs[rank][call].isnan(), raw.isnan())
            assert torch.equal(outputs[rank][call].nan_to_num(), raw.nan_to_num())
            assert torch.equal(
                outputs[rank][call].view(torch.int32), outputs[0][call].view(torch.int32)
            )


def test_a_counter_that_wraps_goes_on() -> None:
    ranks = Ranks(2, 4 * KIB)
    for state in ranks.states:
        state[0] = 2**32 - 3
    inputs = random_calls(2, torch.float32, [200] * 6, seed=1)
    outputs = ranks.all_reduce(inputs, most_blocks=2, seed=1)
    for call in range(6):
        want = in_order_of_ranks([of[call] for of in inputs])
        assert all(torch.equal(outputs[rank][call], want) for rank in range(2))
    assert [int(state[0]) for state in ranks.states] == [3, 3]
