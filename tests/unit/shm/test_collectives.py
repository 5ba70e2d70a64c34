"""Sums and gathers over rings: the bits, among threads; and what ends them, among processes."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.threads import outcomes, swap_among, together
from vllm_commext.collective import Collective
from vllm_commext.errors import CommextTimeoutError, ProtocolError, UnsupportedError
from vllm_commext.shm import collectives
from vllm_commext.shm.collectives import SUMMABLE, RingGroup, is_worth_it, pieces
from vllm_commext.shm.ring import PeerLostError, QueueCancelledError, RingReader, RingWriter

DTYPES = sorted(SUMMABLE, key=str)


@contextmanager
def ranks_of(world_size: int) -> Iterator[list[RingGroup]]:
    swap_of = swap_among(world_size)
    groups = together(
        lambda rank: RingGroup.connect(Collective(rank, world_size, swap_of(rank))), world_size
    )
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, list[RingGroup]]]:
    with ranks_of(2) as two, ranks_of(3) as three, ranks_of(4) as four:
        yield {2: two, 3: three, 4: four}


def ours_in_dev_shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name}


@given(st.integers(0, 200), st.sampled_from([1, 2, 4, 8]), st.integers(8, 100))
def test_pieces_follow_one_another_and_fit(num_items: int, item_bytes: int, limit: int) -> None:
    found = list(pieces(num_items, item_bytes, limit))
    covered = [item for piece in found for item in range(num_items)[piece]]
    assert covered == list(range(num_items))
    assert all(0 < (piece.stop - piece.start) * item_bytes <= limit for piece in found)


def test_an_item_that_fits_no_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes: expected 8 or more, got 7"):
        list(pieces(1, 8, 7))


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "world_size", "expected"),
    [
        (torch.bfloat16, 1 << 30, 2, True),
        (torch.bfloat16, 1 << 20, 4, True),
        (torch.bfloat16, (1 << 20) + 2, 4, False),
        (torch.bool, 1, 2, False),
        (torch.complex64, 8, 2, False),
    ],
)
def test_what_gloo_sums_faster_or_alone_is_left_to_it(
    dtype: torch.dtype, num_bytes: int, world_size: int, expected: bool
) -> None:
    assert is_worth_it(dtype, num_bytes, world_size) == expected


def tensors(data: st.DataObject, world_size: int, dtype: Any) -> list[Any]:
    shape = data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=3), label="shape")
    turned = data.draw(st.booleans(), label="turned")
    torch.manual_seed(data.draw(st.integers(0, 999), label="seed"))
    made = [(torch.randn(shape) * 100).to(dtype) for _ in range(world_size)]
    return [each.permute(tuple(reversed(range(each.dim())))) if turned else each for each in made]


def oracle_sum(parts: list[Any]) -> Any:
    """In the order of ranks; half precision in float32, rounded once."""
    dtype = parts[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32 if half else dtype)
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


@settings(max_examples=150)
@given(st.data(), st.integers(2, 4), st.sampled_from(DTYPES), st.sampled_from([8, 64, 1 << 20]))
def test_a_sum_has_the_oracles_bits_at_every_rank(
    ranks: dict[int, list[RingGroup]], data: st.DataObject, size: int, dtype: Any, limit: int
) -> None:
    given_to = tensors(data, size, dtype)
    expected = oracle_sum([each.clone() for each in given_to])

    def call(rank: int) -> None:
        group = ranks[size][rank]
        group._limit_bytes = limit  # many pieces of a small tensor
        group.all_reduce(given_to[rank])

    together(call, size)
    for found in given_to:
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


@settings(max_examples=60)
@given(st.data(), st.integers(2, 4), st.sampled_from([*DTYPES, torch.bool]), st.integers(8, 99))
def test_a_gather_has_all_ranks_tensors_in_order(
    ranks: dict[int, list[RingGroup]], data: st.DataObject, size: int, dtype: Any, limit: int
) -> None:
    given_to = tensors(data, size, dtype)

    def call(rank: int) -> Any:
        group = ranks[size][rank]
        group._limit_bytes = limit
        output = torch.empty(size * given_to[rank].numel(), dtype=dtype)
        group.all_gather(output, given_to[rank])
        return output

    expected = torch.cat([each.reshape(-1) for each in given_to])
    assert all(torch.equal(found, expected) for found in together(call, size))


@pytest.mark.parametrize("size", [2, 3])
def test_long_tensors_go_through_small_rings(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "LARGEST_RING_BYTES", 64 << 10)
    values = [torch.randn(300_000) for _ in range(size)]
    expected = oracle_sum(values)
    with ranks_of(size) as groups:
        assert {group._limit_bytes for group in groups} == {16 << 10}

        def call(rank: int) -> torch.Tensor:
            found = values[rank].clone()
            groups[rank].all_reduce(found)
            return found

        for _ in range(3):
            assert all(torch.equal(found, expected) for found in together(call, size))


def test_nothing_is_left_in_dev_shm_once_connected() -> None:
    before = ours_in_dev_shm()
    with ranks_of(3):
        assert ours_in_dev_shm() == before


def test_an_output_of_another_size_is_refused_and_harms_nobody(
    ranks: dict[int, list[RingGroup]],
) -> None:
    group = ranks[2][0]
    with pytest.raises(ValueError, match=r"expected a contiguous tensor of 2 x 3 elements"):
        group.all_gather(torch.empty(5), torch.empty(3))
    with pytest.raises(ValueError, match=r"with strides \(1, 2\)"):
        group.all_gather(torch.empty(3, 2).t(), torch.empty(3))
    values = [torch.ones(3), torch.ones(3)]
    together(lambda rank: ranks[2][rank].all_reduce(values[rank]), 2)
    assert values[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda group: group.all_gather(torch.empty(8), torch.ones(4)), "gather of torch.float32"),
        (lambda group: group.all_reduce(torch.ones(5)), "20 bytes"),
        (lambda group: group.all_reduce(torch.ones(8, dtype=torch.bfloat16)), "torch.bfloat16"),
    ],
)
def test_ranks_that_do_not_do_the_same_hear_of_it(
    call: Callable[[RingGroup], None], what: str
) -> None:
    with ranks_of(2) as groups:
        calls = [lambda group: group.all_reduce(torch.ones(4)), call]
        errors = outcomes(lambda rank: calls[rank](groups[rank]), 2)
        # Whoever sees it first ends the group, which may be what the other one hears of.
        assert all(isinstance(each, (ProtocolError, PeerLostError)) for each in errors)
        (told, *_) = [str(each) for each in errors if isinstance(each, ProtocolError)]
        assert what in told
        assert "all ranks must make the same calls" in told
        with pytest.raises((QueueCancelledError, PeerLostError)):
            groups[0].all_reduce(torch.ones(4))


def sum_twice(group: RingGroup) -> None:
    """What another rank gave to the first sum before it went may still be here."""
    group.all_reduce(torch.zeros(4))
    group.all_reduce(torch.zeros(4))


def test_a_rank_that_does_not_come_is_named_until_the_wait_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ranks_of(2) as groups:
        groups[0].timeout_seconds, groups[0]._interval = 0.3, 0.1
        with (
            caplog.at_level(logging.INFO, "vllm.commext.shm"),
            pytest.raises(CommextTimeoutError, match="rank 1: nothing within the timeout"),
        ):
            groups[0].all_reduce(torch.ones(4))
        assert f"rank 1, writer (pid {os.getpid()}, alive" in caplog.text
        with pytest.raises(PeerLostError, match="has shut down its end"):
            sum_twice(groups[1])


@pytest.mark.parametrize("step", ["create", "attach"])
def test_what_one_rank_lacks_is_told_at_all_and_nothing_remains(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = {"create": RingWriter, "attach": RingReader}[step]
    stock, before = getattr(owner, step), ours_in_dev_shm()

    def fail_once(*given: Any) -> Any:
        if threading.current_thread() is chosen[0]:
            raise MemoryError("no room in /dev/shm")
        return stock(*given)

    monkeypatch.setattr(owner, step, fail_once)
    chosen: list[Any] = [None]
    swap_of = swap_among(3)

    def call(rank: int) -> None:
        if rank == 1:
            chosen[0] = threading.current_thread()
        RingGroup.connect(Collective(rank, 3, swap_of(rank)))

    errors = outcomes(call, 3)
    assert [type(error) for error in errors] == [UnsupportedError] * 3
    assert {str(error) for error in errors} == {"rank 1: MemoryError: no room in /dev/shm"}
    assert ours_in_dev_shm() == before
