"""One of two tensor-parallel ranks as vLLM makes them on CPUs; test_cpu_collectives.py starts it.

    python tests/contract/cpu_collectives_rank.py RANK PORT

Prints as JSON what serves the group, and whether sums and gathers have the bits of Gloo's."""

import json
import os
import sys

import torch
from torch import distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.plugins import load_general_plugins

from vllm_commext.compat import cpu_collectives, monkey_patch

WORLD = 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64)
SHAPES = ((), (1,), (7, 3), (2, 128, 64), (3, 500_000))


def inputs(rank: int) -> list[torch.Tensor]:
    """Of every dtype and shape one, different at each rank; the last is not contiguous."""
    torch.manual_seed(rank)
    made = [(torch.randn(shape) * 100).to(dtype) for dtype in DTYPES for shape in SHAPES]
    return [*made, torch.randn(9, 4).t()]


def main() -> None:
    rank, port = int(sys.argv[1]), sys.argv[2]
    # vLLM's own shared memory, on processors that it has it for, needs one name on all ranks.
    os.environ["VLLM_DIST_IDENT"] = f"contract-{rank}"
    load_general_plugins()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            WORLD, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(WORLD)
    group = parallel_state.get_tp_group()
    communicator = group.device_communicator
    assert communicator is not None
    sums, gathers = [], []
    for tensor in inputs(rank):
        expected = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(expected, group=group.device_group)
        sums.append(torch.equal(communicator.all_reduce(tensor.clone()), expected))
    for tensor in [*filter(torch.Tensor.dim, inputs(rank)), torch.arange(6).view(2, 3) % 2 == rank]:
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(WORLD)]
        dist.all_gather(parts, tensor.contiguous(), group=group.device_group)
        expected = torch.cat(parts, dim=-1)
        gathers.append(torch.equal(communicator.all_gather(tensor), expected))
    odd = torch.tensor([rank == 0, False])  # nothing that rings sum
    dist_module = getattr(communicator, "dist_module", None)
    dist_module.all_reduce(odd, group=group.device_group)  # pyright: ignore[reportOptionalMemberAccess]
    collected = communicator.gather(torch.full((2,), rank), dst=0)
    found = {
        "communicator": type(communicator).__name__,
        "patched": monkey_patch.is_patched(cpu_collectives.SYMBOL),
        "served_by": type(dist_module).__name__,
        "sums": sums,
        "gathers": gathers,
        "odd": odd.tolist(),
        "gathered": None if collected is None else collected.tolist(),
    }
    dist.barrier()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
