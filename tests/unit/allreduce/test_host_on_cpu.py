"""The kernels that sum through host memory, on a CPU, rank beside rank."""

import ctypes
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.kit.host_kernels import COMPILER, run_calls
from tests.kit.threads import together
from tests.unit.allreduce.host_emulation import Ranks, library
from tests.unit.allreduce.push_emulation import in_order_of_ranks, random_calls
from vllm_commext.allreduce.backends import host
from vllm_commext.allreduce.backends.host import CHUNK_PACKS, CHUNKS, ONE_SHOT
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.gpu.launch import ELEMENT_CODES, Device
from vllm_commext.gpu.nvrtc import Program

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")

KIB = 1 << 10
RENEWAL = 1 << 14  # calls
FOUR_OR_FIVE = [pytest.param(number, marks=pytest.mark.long) for number in (4, 5)]
CASES = [  # every kernel, every element type in each kernel
    *((2, torch.float32), (2, torch.float16), (3, torch.bfloat16)),
    pytest.param(4, torch.float16, marks=pytest.mark.long),
    pytest.param(5, torch.float32, marks=pytest.mark.long),
    pytest.param(2, torch.bfloat16, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("world_size", "dtype"), [*CASES, (8, torch.bfloat16)], ids=str)
def test_all_ranks_get_the_sum_in_the_order_of_ranks(world_size: int, dtype: torch.dtype) -> None:
    numbers = random.Random(world_size)
    # From one pack to several rounds of the blocks there are, of one kernel after the other.
    ranks = Ranks(world_size, 384 * KIB)
    large = ranks.layout.one_shot_bytes // PACK_BYTES + 1
    sizes = [1, 223, 224, 225, large, 1, large + 5 * CHUNK_PACKS // 2, numbers.randrange(1, 3000)]
    kernels = [ranks.kernel(size) for size in sizes]
    assert set(kernels) == set(ranks.layout.kernels)
    inputs = random_calls(world_size, dtype, sizes, seed=world_size)
    outputs = ranks.all_reduce(inputs, most_blocks=3, seed=world_size)
    for call in range(len(sizes)):
        want = in_order_of_ranks([of[call] for of in inputs])
        for rank in range(world_size):
            assert torch.equal(outputs[rank][call], want), (call, rank)
    assert [state.tolist() for state in ranks.states] == [[len(sizes), 0]] * world_size


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [*CASES, pytest.param(8, torch.bfloat16, marks=pytest.mark.long)],
    ids=str,
)
def test_every_bit_pattern_passes(world_size: int, dtype: torch.dtype) -> None:
    """What is sent among them: numbers of calls, and what a fresh outbox holds."""
    words = [0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0, 1, 2, 0x7F800000, 0xFF80FF80]
    ranks = Ranks(world_size, 384 * KIB)
    large = ranks.layout.one_shot_bytes // PACK_BYTES + 2
    raw = [
        torch.tensor(words * (packs // 2), dtype=torch.int64).to(torch.int32).view(dtype)
        for packs in (200, large - large % 2)
    ]
    assert [ranks.kernel(of.nbytes // PACK_BYTES) for of in raw] == [ONE_SHOT, CHUNKS]
    inputs = [
        [of if source == rank else torch.full_like(of, -0.0) for source in (0, 1) for of in raw]
        for rank in range(world_size)
    ]
    outputs = ranks.all_reduce(inputs, most_blocks=2, seed=3)
    for call, of in enumerate([*raw, *raw]):
        for rank in range(world_size):
            found = outputs[rank][call]
            assert torch.equal(found.isnan(), of.isnan())
            kept = ~of.isnan()
            assert torch.equal(bits(found)[kept], bits(of)[kept])
            assert torch.equal(bits(found), bits(outputs[0][call]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("world_size", [2, 3, *FOUR_OR_FIVE])
def test_a_row_has_the_same_bits_in_either_kernel(world_size: int) -> None:
    """Numbers whose sum depends on the order: alone, in a batch, behind other rows."""
    ranks = Ranks(world_size, 384 * KIB)
    row = 8  # packs
    rows = ranks.layout.one_shot_bytes // (row * PACK_BYTES) + 38
    generator = torch.Generator().manual_seed(world_size)
    size = (rows, row * PACK_BYTES // 4)
    batches = [
        torch.randn(size, generator=generator) * 10.0 ** torch.randint(-4, 5, size).float()
        for _ in range(world_size)
    ]
    splits = [[rows], [1, 5, rows - 6]]
    before = torch.ones(3, size[1])
    inputs = [
        [part.contiguous() for split in splits for part in batch.split(split)]
        + [torch.cat([before, batch])]
        for batch in batches
    ]
    assert ranks.kernel(5 * row) == ONE_SHOT
    assert ranks.kernel(rows * row) == CHUNKS
    outputs = ranks.all_reduce(inputs, most_blocks=3, seed=world_size)
    for found in outputs:
        whole = outputs[0][0]
        assert torch.equal(torch.cat(found[1:4]), whole)
        assert torch.equal(found[4][len(before) :], whole)


@pytest.mark.parametrize(
    ("world_size", "count", "large_first"),
    [
        *((2, RENEWAL, True), (2, 2**32, False), (4, 2**32, True)),
        pytest.param(4, 3 * RENEWAL, False, marks=pytest.mark.long),
    ],
)
def test_what_an_earlier_round_of_numbers_left_is_taken_for_nothing(
    world_size: int, count: int, large_first: bool
) -> None:
    """Parcels with the numbers of calls to come lie where no message has been for long."""
    ranks = Ranks(world_size, 320 * KIB)
    layout = ranks.layout
    for state in ranks.states:
        state[0] = count - 3
    for memory in ranks.memories:
        half = memory.reshape(2, -1, 4)
        half[0, :, 3], half[1, :, 3] = (count + 4) % 2**32, (count + 5) % 2**32
        half[:, :, :3] = 0xABABABAB
    small, large = layout.one_shot_bytes // PACK_BYTES, layout.max_packs
    assert [ranks.kernel(size) for size in (small, large)] == [ONE_SHOT, CHUNKS]
    last = [large, small] if large_first else [small, large]
    inputs = random_calls(world_size, torch.float32, [*[5] * 6, *last, 5], seed=1)
    outputs = ranks.all_reduce(inputs, most_blocks=2, seed=1)
    for call in range(9):
        want = in_order_of_ranks([of[call] for of in inputs])
        assert all(torch.equal(outputs[rank][call], want) for rank in range(world_size)), call
    assert {int(state[0]) for state in ranks.states} == {(count + 6) % 2**32}


def test_a_parcel_of_the_call_before_is_waited_for() -> None:
    """Rank 1 is late by design of the emulation; what it left two calls ago has the same place."""
    ranks = Ranks(2, 8 * KIB)
    inputs = random_calls(2, torch.float32, [300] * 40, seed=9)
    outputs = ranks.all_reduce(inputs, most_blocks=1, seed=9)
    for call in range(40):
        want = in_order_of_ranks([of[call] for of in inputs])
        assert all(torch.equal(outputs[rank][call], want) for rank in range(2)), call
    for memory in ranks.memories:
        assert np.isin(memory.reshape(-1, 4)[:300, 3] & 0xFFFF, [39, 40]).all()


def test_the_backend_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real launch gets, of messages of one part and of several, whose last one is small."""
    ranks = Ranks(2, 320 * KIB)
    monkeypatch.setattr(host, "MAX_MESSAGE_BYTES", 320 * KIB)
    monkeypatch.setattr(host.launch, "current_device", lambda: Device(0, 90, 132))
    monkeypatch.setattr(host, "check_delivery", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    launched: list[str] = []

    def load(program: Program, macros: dict[str, int], *_: Any, **__: Any) -> Any:
        dtype = next(name for name, code in ELEMENT_CODES.items() if code == macros["ELEMENT"])
        rank = macros["RANK"]

        def run(made: ctypes.Structure, blocks: int, _: int) -> None:
            launched.append(program.name)
            kernel = library(ranks.layout, program.name, dtype)
            run_calls(kernel, ctypes.byref(made), [blocks], 2, rank, rank)

        return SimpleNamespace(launch=run)

    class Memory:
        def __init__(self, num_bytes: int, collective: Any, marked: int) -> None:
            assert num_bytes == ranks.memories[0].nbytes
            assert marked == 2 * PACK_BYTES
            self.addresses = [memory.ctypes.data for memory in ranks.memories]

        def forget_files(self) -> None:
            pass

    monkeypatch.setattr(host.launch, "load", load)
    monkeypatch.setattr(host, "HostMemory", Memory)
    states = iter(ranks.states)
    monkeypatch.setattr(host.ipc, "allocate", lambda _: next(states).ctypes.data)
    backends = [
        host.HostBackend(64 << 20, cast(Any, SimpleNamespace(rank=r, world_size=2, agree=agree)))
        for r in range(2)
    ]
    packs = ranks.layout.max_packs
    inputs = random_calls(2, torch.bfloat16, [7, 2 * packs + 100], seed=4)
    outputs = together(lambda rank: [*map(backends[rank].all_reduce, inputs[rank])], 2)
    for call in range(2):
        want = in_order_of_ranks([of[call] for of in inputs])
        assert all(torch.equal(outputs[rank][call], want) for rank in range(2)), call
    assert Counter(launched) == {ONE_SHOT: 4, CHUNKS: 4}


def agree(step: Callable[[], object]) -> None:
    step()
