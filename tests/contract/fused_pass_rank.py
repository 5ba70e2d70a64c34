"""One rank of the checks of our pass in vLLM's compiled models; test_fused_pass.py starts it.

    python tests/contract/fused_pass_rank.py RANK WORLD_SIZE STORE_FILE CACHE_FOLDER WAYS

A tiny model of vLLM's own layers is compiled as vLLM compiles its models, on CPUs, once for each of
the comma-separated WAYS. Prints what it found as the last line, in JSON.
"""

import json
import os
import sys
import zlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

LAYERS, HIDDEN, WIDE, VOCABULARY, TOKENS, MOST = 4, 256, 128, 96, (5, 12), 32
ON, OFF, APART, GEMMA = "on", "off", "apart", "gemma"
# The epilogue that a quantiser becomes, and after a colon whether it is vLLM's op or torch's.
OP, NATIVE = "op", "native"
QUANTISED = (
    *(f"fp8_static:{OP}", f"fp8_static:{NATIVE}", f"fp8_row:{OP}", f"fp8_row:{NATIVE}"),
    *(f"fp8_group:{OP}", f"fp8_group_columns:{OP}", f"fp8_group_columns_4:{OP}"),
)


def define_quantisers() -> None:
    """vLLM's ops, of which builds for CPUs have the names alone; before anybody imports them."""
    from vllm.platforms import current_platform

    from vllm_commext.allreduce.fused import op as fused_op
    from vllm_commext.allreduce.fused.layout import EPILOGUES, FusedShape

    def quantise(
        epilogue: str, out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, given: bool
    ) -> None:
        shape = FusedShape("float32", "float32", x.shape[1], False, 0, *EPILOGUES[epilogue])
        found = fused_op._quantised(shape, x, x, scale if given else None)
        out.copy_(found.out)
        if not given:
            scale.copy_(found.scales)

    current_platform.import_kernels()
    library = torch.library.Library("commext_quantisers", "DEF")
    signatures = {
        "static_scaled_fp8_quant": "Tensor! result, Tensor input, Tensor scale, "
        "SymInt[]? group_shape=None",
        "dynamic_per_token_scaled_fp8_quant": "Tensor! result, Tensor input, Tensor! scale, "
        "Tensor? scale_ub",
        "per_token_group_fp8_quant": "Tensor input, Tensor! output_q, Tensor! output_s, "
        "int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0, "
        "bool dummy_is_scale_transposed=False, bool dummy_is_tma_aligned=False",
    }
    functions = (
        lambda out, x, scale, _=None: quantise("fp8_static", out, x, scale, True),
        lambda out, x, scale, _: quantise("fp8_row", out, x, scale, False),
        lambda x, out, scale, *_: quantise("fp8_group", out, x, scale, False),
    )
    for (name, signature), function in zip(signatures.items(), functions, strict=True):
        library.define(f"{name}({signature}) -> ()")
        library.impl(name, function, "CPU")
        setattr(torch.ops._C, name, getattr(torch.ops.commext_quantisers, name))
    kept.append(library)


kept: list[Any] = []


def make_quantiser(way: str) -> Any:
    """Turns a norm into numbers of 8 bits as vLLM's layers do, and back."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    epilogue, written = way.split(":")
    static = epilogue == "fp8_static"
    kind = GroupShape.PER_TENSOR if static else GroupShape.PER_TOKEN
    native = QuantFP8(static, kind)
    given = torch.tensor([0.05]) if static else None
    fp8_utils.current_platform = SimpleNamespace(
        is_cuda_alike=lambda: True, fp8_dtype=lambda: torch.float8_e4m3fn
    )

    def quantise(x: torch.Tensor) -> torch.Tensor:
        if epilogue.startswith("fp8_group"):
            q, scale = fp8_utils.per_token_group_quant_fp8(
                *(x, 128),
                column_major_scales=epilogue != "fp8_group",
                tma_aligned_scales=epilogue == "fp8_group_columns_4",
                use_ue8m0=False,
            )
            return (q.float().unflatten(1, (-1, 128)) * scale[:, :, None]).flatten(1)
        if written == NATIVE:
            q, scale = native(x, given)
        else:
            q, scale = _custom_ops.scaled_fp8_quant(
                x, given, use_per_token_if_dynamic=True, group_shape=(-1, -1) if static else None
            )
        return q.float() * scale

    return quantise


def make_model(config: Any, way: str) -> Any:
    """Layers like a Llama's, each with two sums over the ranks, and an embedding with one."""
    gemma, quantised = way == GEMMA, way in QUANTISED
    from vllm.compilation.decorators import support_torch_compile
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    norm = GemmaRMSNorm if gemma else RMSNorm
    quantise = make_quantiser(way) if quantised else lambda x: x

    class Layer(nn.Module):
        def __init__(self, prefix: str) -> None:
            super().__init__()
            self.before, self.after = norm(HIDDEN), norm(HIDDEN)
            self.up = ColumnParallelLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.up")
            self.down = RowParallelLinear(HIDDEN, HIDDEN, bias=False, prefix=f"{prefix}.down")
            self.wide = ColumnParallelLinear(HIDDEN, WIDE, bias=False, prefix=f"{prefix}.wide")
            self.narrow = RowParallelLinear(WIDE, HIDDEN, bias=False, prefix=f"{prefix}.narrow")

        def forward(self, x: torch.Tensor, residual: Any) -> Any:
            if residual is None:
                residual, x = x, self.before(x)
            else:
                x, residual = self.before(x, residual)
            x, residual = self.after(self.down(self.up(quantise(x))[0])[0], residual)
            return self.narrow(nn.functional.silu(self.wide(quantise(x))[0]))[0], residual

    @support_torch_compile(dynamic_arg_dims={"input_ids": 0})
    class Model(nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            del vllm_config
            self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN)
            self.layers = nn.ModuleList([Layer(f"{prefix}{i}") for i in range(LAYERS)])
            self.norm = norm(HIDDEN)

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
        weight.data = (made + float(is_norm and not gemma)).to(weight.dtype)
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
        model = make_model(config, way)
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
    found["quantised"] = fused_pass.counts["quantised"] - before["quantised"]
    found["identity"] = fused_pass.identity()
    return found


def main() -> None:
    rank, world, store, cache, ways = *map(int, sys.argv[1:3]), *sys.argv[3:6]
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
    # An executor of vLLM's would set it, for its own shared memory.
    os.environ["VLLM_DIST_IDENT"] = f"commext_{zlib.crc32(store.encode())}"
    if set(QUANTISED).intersection(ways.split(",")):
        define_quantisers()
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
    found = [
        run(way, f"{cache}/{way if way == GEMMA or way in QUANTISED else ''}")
        for way in ways.split(",")
    ]
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
