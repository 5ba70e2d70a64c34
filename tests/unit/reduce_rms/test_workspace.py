"""Workspaces and ops over GPUs that are not there: see fake_gpu.py."""

import ctypes
import platform
from typing import Any

import pytest
import torch

from tests.kit.host_kernels import COMPILER
from tests.unit.reduce_rms.emulation import EPS, exact
from tests.unit.reduce_rms.fake_gpu import Group, HostKernels, Runtime, fake_gpus
from vllm_commext.errors import CommextTimeoutError, ConfigError, ProtocolError, UnsupportedError
from vllm_commext.gpu.launch import Device
from vllm_commext.reduce_rms import kernel
from vllm_commext.reduce_rms.workspace import LamportWorkspace, find, find_tensor

RANKS = 2
SIZE = 2 << 20
runs_kernel = pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="needs g++ on x86_64"
)
Fakes = tuple[Runtime, Group, HostKernels]


@pytest.fixture
def fakes() -> Any:
    with fake_gpus(RANKS) as made:
        yield made


def make(rank: int, **options: Any) -> LamportWorkspace:
    return LamportWorkspace(rank, RANKS, SIZE, **options)


def words_of(workspace: LamportWorkspace) -> list[int]:
    count = kernel.num_words(RANKS)
    return list((ctypes.c_uint64 * count).from_address(workspace.words_ptr))


def test_all_ranks_see_each_others_slots_filled_with_the_sentinel(fakes: Fakes) -> None:
    runtime, group, _ = fakes
    made = group.run(make)
    words = [words_of(workspace) for workspace in made]
    assert words[0][:RANKS] == words[1][:RANKS]
    for rank, address in enumerate(words[0][:RANKS]):
        block = bytes(runtime.memory[address])
        assert block == kernel.SENTINEL_BITS.to_bytes(4, "little") * (3 * SIZE // 4)
        assert words[rank][RANKS + 3 :] == [SIZE, rank]
        assert len(words[rank]) == kernel.num_words(RANKS)
    assert sorted(runtime.opened) == sorted(words[0][:RANKS])


def test_cleanup_gives_everything_back_and_may_be_called_again(fakes: Fakes) -> None:
    runtime, group, _ = fakes
    for _ in range(3):
        made = group.run(make)
        handles = [workspace.handle for workspace in made]
        for workspace in made:
            assert find(workspace.handle) is workspace
            assert find_tensor(workspace.workspace) is workspace
            workspace.cleanup()
            workspace.cleanup()
        assert (runtime.memory, runtime.opened) == ({}, [])
        for handle in handles:
            with pytest.raises(ConfigError, match="live workspace"):
                find(handle)


def test_a_workspace_that_is_dropped_is_cleaned_up(fakes: Fakes) -> None:
    runtime, group, _ = fakes
    made = group.run(make)
    made.clear()
    assert (runtime.memory, runtime.opened) == ({}, [])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("refuse_mapping", "no peer access"),
        ("loses_stores", "rank 1: UnsupportedError: expected a store from each peer"),
        ("refuse_second_block", "allocating"),
    ],
)
def test_what_a_machine_cannot_do_fails_on_all_ranks_at_once_and_leaves_nothing(
    fault: str, said: str, fakes: Fakes
) -> None:
    runtime, group, _ = fakes
    setattr(runtime, fault, True)
    errors = group.run(make)
    assert [type(error) for error in errors] == [UnsupportedError] * RANKS
    assert said in str(errors[0])
    assert (runtime.memory, runtime.opened) == ({}, [])


def test_ranks_that_differ_in_their_arguments_hear_of_it(fakes: Fakes) -> None:
    _, group, _ = fakes
    errors = group.run(lambda rank: LamportWorkspace(rank, RANKS, SIZE * (1 + rank)))
    assert [type(error) for error in errors] == [ProtocolError] * RANKS


@pytest.mark.parametrize(
    ("rank", "world_size", "comm_size"), [(0, 1, SIZE), (0, 9, SIZE), (2, 2, SIZE), (0, 2, 0)]
)
def test_arguments_out_of_range(rank: int, world_size: int, comm_size: int) -> None:
    with pytest.raises(ConfigError, match="expected"):
        LamportWorkspace(rank, world_size, comm_size)


def test_what_a_kernel_reports_is_raised_from_then_on(fakes: Fakes) -> None:
    _, group, _ = fakes
    workspace = group.run(make)[0]
    workspace.raise_if_failed()
    workspace._reported.value = (1 << 56) | (1 << 32) | 7
    with pytest.raises(CommextTimeoutError, match=r"rank 1 for token 7 within 30 s"):
        workspace.raise_if_failed()
    workspace._reported.value = (2 << 56) | 3
    with pytest.raises(ProtocolError, match="same time"):
        workspace.raise_if_failed()


qk_rms_norm = torch.ops.vllm_commext.qk_rms_norm


def rows_of(rank: int, tokens: int, columns: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * rank + tokens)
    return torch.randn(tokens, columns, generator=random).to(torch.bfloat16)


@runs_kernel
def test_ops_from_end_to_end(fakes: Fakes) -> None:
    """Pieces, strides and both parts, through real arguments."""
    _, group, kernels = fakes
    weights = torch.randn(64).to(torch.bfloat16), torch.randn(16).to(torch.bfloat16)

    def body(rank: int) -> list[torch.Tensor]:
        workspace = make(rank, max_tokens_per_launch=4)
        handle, outs = workspace.handle, []
        for tokens in (1, 11, 0, 4):
            outs += qk_rms_norm(rows_of(rank, tokens, 96), *weights, handle, EPS)
            outs += qk_rms_norm(rows_of(rank, tokens, 101)[:, 5:], *weights, handle, EPS)
        workspace.raise_if_failed()
        return outs

    results = group.run(body)
    place = iter(range(100))
    for tokens in (1, 11, 0, 4):
        for columns, start in ((96, 0), (101, 5)):
            for part, (first, last) in enumerate(((0, 64), (64, 80))):
                rows = [rows_of(rank, tokens, columns)[:, start:] for rank in range(RANKS)]
                wanted = exact([row[:, first:last] for row in rows], [weights[part]] * RANKS)
                at = next(place)
                for rank in range(RANKS):
                    assert results[rank][at].is_contiguous()
                    torch.testing.assert_close(
                        results[rank][at].double(), wanted[rank], rtol=2**-8, atol=1e-30
                    )
    assert set(kernels.launches) == {1, 3, 4}


@runs_kernel
def test_what_torch_holds_may_lose_its_content(fakes: Fakes) -> None:
    """As it does when vLLM sleeps: it takes what torch gave while a model was made."""
    _, group, _ = fakes
    weight = torch.randn(64).to(torch.bfloat16)

    def body(rank: int) -> torch.Tensor:
        workspace = make(rank)
        held = [value for value in vars(workspace).values() if isinstance(value, torch.Tensor)]
        for tensor in held:
            if tensor is not workspace._report:  # host memory, which sleep leaves alone
                tensor.zero_()
        rows = rows_of(rank, 3, 128)
        return qk_rms_norm(rows, weight, weight, workspace.handle, EPS)[0]

    results = group.run(body)
    wanted = exact([rows_of(rank, 3, 128)[:, :64] for rank in range(RANKS)], [weight] * RANKS)
    for rank in range(RANKS):
        torch.testing.assert_close(results[rank].double(), wanted[rank], rtol=2**-8, atol=1e-30)


@runs_kernel
@pytest.mark.parametrize(
    "world_size", [2, 3, *(pytest.param(few, marks=pytest.mark.long) for few in range(4, 9))]
)
def test_a_batch_invariant_row_has_the_same_bits_alone_and_among_others(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.reduce_rms.fake_gpu import workspace as made_with

    columns = 2880  # of float32, in which the order of additions shows
    weights = torch.randn(columns).split(columns // 2)

    def body(rank: int) -> list[torch.Tensor]:
        workspace = LamportWorkspace(
            rank, world_size, SIZE, batch_invariant=True, timeout_seconds=300.0
        )
        random = torch.Generator().manual_seed(rank)
        rows = torch.randn(5, columns, generator=random)
        calls = [rows, *(row[None] for row in rows)]  # 2 a multiprocessor is where the form changes
        calls.append(torch.cat([torch.ones_like(rows[:2]), rows, torch.ones_like(rows[:1])]))
        outs = (qk_rms_norm(call, *weights, workspace.handle, EPS) for call in calls)
        return [torch.cat(both, 1) for both in outs]

    with fake_gpus(world_size) as (_, group, _):
        monkeypatch.setattr(made_with, "current_device", lambda: Device(0, 90, 1))
        results = group.run(body)
    for whole, *alone, padded in results:
        assert torch.equal(whole, torch.cat(alone))
        assert torch.equal(whole, padded[2:-1])


def test_a_kernel_that_one_rank_cannot_load_is_an_error_on_all_and_nothing_is_launched(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, group, kernels = fakes
    ranks = iter(range(RANKS))

    def load(*_: Any) -> None:
        if next(ranks) == 1:
            raise OSError("the disk is full")

    monkeypatch.setattr(kernels, "load", load)
    weight = torch.ones(64, dtype=torch.bfloat16)

    def body(rank: int) -> torch.Tensor:
        workspace = make(rank)
        return qk_rms_norm(rows_of(rank, 3, 128), weight, weight, workspace.handle, EPS)[0]

    errors = group.run(body)
    assert [type(error) for error in errors] == [UnsupportedError] * RANKS
    assert "the disk is full" in str(errors[0])
    assert kernels.launches == []


@runs_kernel
def test_a_failed_workspace_is_not_called_again(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, group, kernels = fakes
    made = group.run(lambda rank: make(rank, timeout_seconds=0.3))
    workspace = made[0]  # the other stays, for its memory is written to
    monkeypatch.setattr(workspace, "prepare", lambda *_: None)  # which would need the other
    rows, weight = rows_of(0, 3, 128), torch.ones(64, dtype=torch.bfloat16)
    for out in qk_rms_norm(rows, weight, weight, workspace.handle, EPS):
        assert bool(out.isnan().all())
    with pytest.raises(CommextTimeoutError, match="rank 1"):
        qk_rms_norm(rows, weight, weight, workspace.handle, EPS)
    assert kernels.launches == [3]
