"""One rank of the checks of our pass in vLLM's compiled models; test_fused_pass.py starts it.

    python tests/contract/fused_pass_rank.py RANK WORLD_SIZE STORE_FILE CACHE_FOLDER WAYS

A tiny model of vLLM's own layers is compiled as vLLM compiles its models, on CPUs, once for each of
the comma-separated WAYS. Prints what it found as the last line, in JSON.
"""

import json
import os
import sys
import zlib
from typing import Any

import torch
from torch import nn

LAYERS, HIDDEN, WIDE, VOCABULARY, TOKENS, MOST = 4, 256, 128, 96, (5, 12), 32
ON, OFF, APART = "on", "off", "apart"


def make_model(config: Any) -> Any:
    """Layers like a Llama's, each with two sums over the ranks, and an embedding with one."""
    from vllm.compilation.decorators import support_torch_compile
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    class Layer(nn.Module):
        def __init__(self, prefix: str) -> None:
            super().__init__()
            self.before, self.after = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
            self.up = ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.up")
            self.down = RowParallelLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.down")
            self.wide = ColumnParallelLinear(HIDDEN, WIDE, bias=False, prefix=f"{prefix}.wide")
            self.narrow = RowParallelLinear(WIDE, HIDDEN, bias=False, prefix=f"{prefix}.narrow")

        def forward(self, x: torch.Tensor, residual: Any) -> Any:
            if residual is None:
                residual, x = x, self.before(x)
            else:
                x, residual = self.before(x, residual)
            x, residual = self.after(self.down(self.up(x)[0])[0], residual)
            return self.narrow(nn.functional.silu(self.wide(x)[0]))[0], residual

    @support_torch_compile(dynamic_arg_dims={"input_ids": 0})
    class Model(nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            del vllm_config
            self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN)
            self.layers = nn.ModuleList([Layer(f"{prefix}{i}") for i in range(LAYERS)])
            self.norm = RMSNorm(HIDDEN)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x, residual = self.embedding(input_ids), None
            for layer in self.layers:
                x, residual = layer(x, residual)
            return self.norm(x, residual)[0]

    model = Model(vllm_config=config)
    generator = torch.Generator().manual_seed(3 + torch.distributed.get_rank())
    same = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        is_norm = weight.dim() == 1
        made = torch.rand(weight.shape, generator=same if is_norm else generator) - 0.5
        weight.data = (made + float(is_norm)).to(weight.dtype)
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            # vLLM's own for CPUs writes into its output, which the passes for GPUs stumble over.
            module.cpu_linear = nn.functional.linear
    return model.eval()


def make_config() -> Any:
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig

    config = VllmConfig()
    config.compilation_config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=CUDAGraphMode.NONE,
        custom_ops=["none"],
        splitting_ops=[],
        compile_sizes=[],
        compile_ranges_endpoints=[MOST],
        inductor_compile_config={"combo_kernels": False},
    )
    return config


def serve(way: str) -> Any:
    """Let the group's name serve our op, as a communicator of GPUs would."""
    from vllm.distributed import get_tp_group

    from vllm_commext.allreduce import limits
    from vllm_commext.allreduce.dispatcher import FusedPolicy
    from vllm_commext.allreduce.fused import op as fused_op
    from vllm_commext.allreduce.table import Row, Table
    from vllm_commext.compat import fused_pass

    group = get_tp_group()
    fused_op.forget_group(group.unique_name)
    if way == OFF:
        return None
    first = limits.UNFUSED if way == APART else limits.FUSED_PUSH
    table = Table(2, {}, "test", {"float32": (Row(1 << 30, (first,)),)})
    apart = fused_op.after_all_reduce(group.device_communicator.all_reduce)
    norm = fused_op.FusedNorm(apart, None, FusedPolicy(table))
    fused_op.register_group(group.unique_name, norm)
    fused_pass.install()
    return norm


def run(way: str, cache: str) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.forward_context import set_forward_context

    from vllm_commext.compat import fused_pass

    os.environ["VLLM_CACHE_ROOT"] = cache  # its names do not tell one model here from another
    norm = serve(way)
    config = make_config()
    sums = get_tp_group().device_communicator.sums
    before = fused_pass.counts.copy()
    found: dict[str, Any] = {"ops": [], "sums": [], "difference": []}
    with set_current_vllm_config(config), torch.inference_mode():
        model = make_model(config)
        for count in TOKENS:
            tokens = torch.arange(count) % VOCABULARY
            with set_forward_context(None, config, num_tokens=count):
                want = model.forward(tokens)
                calls = norm.calls.total() if norm else 0
                sums.clear()
                got = model(tokens)
            found["ops"].append(norm.calls.total() - calls if norm else 0)
            found["sums"].append(len(sums))
            found["difference"].append((got - want).abs().max().item())
    found["replaced"] = fused_pass.counts["replaced"] - before["replaced"]
    found["identity"] = fused_pass.identity()
    return found


def main() -> None:
    rank, world, store, cache, ways = *map(int, sys.argv[1:3]), *sys.argv[3:6]
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
    # An executor of vLLM's would set it, for its own shared memory.
    os.environ["VLLM_DIST_IDENT"] = f"commext_{zlib.crc32(store.encode())}"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world, rank, f"file://{store}", rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(world)
    # As on GPUs, where the compiler sees an op, and the sum is a new tensor.
    group = parallel_state.get_tp_group()
    group.use_custom_op_call = True
    sums: list[int] = []

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        sums.append(len(tensor))
        out = tensor.clone()
        torch.distributed.all_reduce(out, group=group.device_group)
        return out

    group.device_communicator.all_reduce, group.device_communicator.sums = all_reduce, sums
    found = [run(way, cache) for way in ways.split(",")]
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
