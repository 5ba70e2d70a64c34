"""One rank of the kernels' checks with more ranks than GPUs; test_shared_gpus.py starts them.

    python tests/gpu/shared_gpu_ranks.py RANK WORLD_SIZE PORT [CHECK ...]

Ranks that share a GPU run in turn there, so every wait in a kernel lasts a time slice of
milliseconds: nothing is timed, and sizes are few. NCCL takes no two ranks of one GPU, so the ranks
agree through gloo and use the kernels without vLLM's group. A line of JSON a check on rank 0."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
from torch import distributed

from tests.kit.gpu_ranks import checks_of, run_checks
from tests.unit.allreduce.push_emulation import in_order_of_ranks
from vllm_commext.allreduce.fused import layout as fused_layout
from vllm_commext.allreduce.fused import op as fused_op
from vllm_commext.allreduce.fused.kernels import FusedKernels, Operands, PushFused
from vllm_commext.allreduce.fused.layout import EPILOGUES, NORM, STATIC_FP8, FusedShape
from vllm_commext.allreduce.limits import Message
from vllm_commext.allreduce.push import PushBackend
from vllm_commext.collective import Collective

MESSAGE_BYTES = 1 << 20
GROUP_SECONDS = 120
HIDDEN = 1024
ROWS = 600  # more than a launch takes in float32, and more than one form serves
SPLITS = ((0, 1), (7, 8), (1, 18), (100, 164), (ROWS - 90, ROWS))


Figures = dict[str, int]


class Rank:
    def __init__(self) -> None:
        self.group = distributed.group.WORLD
        assert self.group is not None
        self.collective = Collective.over(self.group)
        self.rank, self.world = self.collective.rank, self.collective.world_size
        self.push = PushBackend(MESSAGE_BYTES, self.collective)
        self.fused = PushFused(FusedKernels(self.push.memory, self.collective), self.world)

    def parts(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's rows, of numbers whose sum depends on the order of additions."""
        made: list[torch.Tensor] = []
        for rank in range(self.world):
            dice = torch.Generator("cuda").manual_seed(100 + rank)
            size = (ROWS, HIDDEN)
            wide = torch.randn(size, generator=dice, device="cuda")
            made.append(
                (wide * 10.0 ** torch.randint(-3, 4, size, generator=dice, device="cuda")).to(dtype)
            )
        return made


def check_all_reduce(rank: Rank) -> Figures:
    """Every bit that of a sum in the order of ranks, whatever else is in the batch."""
    batches = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parts = rank.parts(dtype)
        want, mine = in_order_of_ranks(parts), parts[rank.rank]
        for begin, end in ((0, ROWS), *SPLITS):
            rows = mine[begin:end].contiguous()
            assert rank.push.takes(Message(tuple(rows.shape), str(dtype).removeprefix("torch.")))
            assert torch.equal(rank.push.all_reduce(rows), want[begin:end]), (dtype, begin, end)
            batches += 1
    return {"batches": batches}


def check_fused(rank: Rank) -> Figures:
    """Every form of the fused op has the residual of that sum, and a row's norm has the same bits
    in any batch."""
    batches = 0
    for dtype in (torch.bfloat16, torch.float32):
        shape = FusedShape(str(dtype).removeprefix("torch."), "float32", HIDDEN, residual=True)
        rank.fused.prepare(shape)
        parts = rank.parts(dtype)
        dice = torch.Generator("cuda").manual_seed(1)
        weight = torch.rand(HIDDEN, device="cuda", generator=dice)
        old = torch.randn((ROWS, HIDDEN), device="cuda", generator=dice).to(dtype)
        want = (in_order_of_ranks(parts).float() + old.float()).to(dtype)
        whole: torch.Tensor | None = None
        kernels: set[str] = set()
        for begin, end in ((0, ROWS), *SPLITS):
            rows, residual = parts[rank.rank][begin:end].contiguous(), old[begin:end].contiguous()
            kernels.add(fused_layout.choose(shape, end - begin, rank.world).kernel)
            made = rank.fused.run(Operands(shape, rows, residual, weight, 1e-6))
            whole = made.out.clone() if whole is None else whole
            assert torch.equal(made.residual, want[begin:end]), (dtype, begin, end)
            assert torch.equal(made.out, whole[begin:end]), (dtype, begin, end)
            batches += 1
        assert kernels == {form.kernel for form in fused_layout.forms(shape, rank.world)}, kernels
    return {"batches": batches}


def check_epilogues(rank: Rank) -> Figures:
    """What every epilogue makes of a row is to the bit what comes of the norm in as many bits as it
    has, whatever else is in the batch."""
    dtype, batches = torch.bfloat16, 0
    rows = rank.parts(dtype)[rank.rank].clone()
    dice = torch.Generator("cuda").manual_seed(2)
    weight = torch.randn(HIDDEN, device="cuda", generator=dice).to(dtype)
    old = torch.randn((ROWS, HIDDEN), device="cuda", generator=dice).to(dtype)
    given = torch.tensor([0.0371], device="cuda")
    plain = FusedShape("bfloat16", "bfloat16", HIDDEN)
    rank.fused.prepare(plain)
    norm = rank.fused.run(Operands(plain, rows, old, weight, 1e-6))
    for code, alignment in EPILOGUES.values():
        if code == NORM:
            continue
        shape = replace(plain, epilogue=code, scale_alignment=alignment)
        rank.fused.prepare(shape)
        scale = given if code == STATIC_FP8 else None
        for begin, end in ((0, ROWS), *SPLITS):
            part, residual = rows[begin:end].contiguous(), old[begin:end].contiguous()
            made = rank.fused.run(Operands(shape, part, residual, weight, 1e-6, scale))
            out, z = norm.out[begin:end], norm.residual[begin:end]
            want = fused_op._quantised(shape, out.float(), z.contiguous(), scale)
            assert torch.equal(made.residual, z), (shape, begin, end)
            assert torch.equal(made.out.view(torch.uint8), want.out.view(torch.uint8)), (shape, end)
            if code != STATIC_FP8:
                assert torch.equal(made.scales, want.scales), (shape, begin, end)
                assert made.scales.stride() == want.scales.stride(), (shape, begin, end)
            batches += 1
    return {"batches": batches}


CHECKS: dict[str, Callable[[Rank], Figures]] = checks_of(globals())


def main() -> None:
    rank, world, port = (int(text) for text in sys.argv[1:4])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    with torch.inference_mode():
        made = Rank()
        run_checks(made, CHECKS, sys.argv[4:])
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # tear-down with peers' memory mapped can hang


if __name__ == "__main__":
    main()
