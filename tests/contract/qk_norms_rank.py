"""One of two ranks with MiniMax-M2's norm of Q and K; test_qk_norms.py starts it.

    python tests/contract/qk_norms_rank.py RANK PORT

Prints as JSON what vLLM's layer gives, made by its own constructor."""

import json
import os
import sys

import torch

TOKENS, EPS = 5, 1e-6
Q, KV = 32, 16  # of a rank


def numbers(seed: int, *shape: int) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(torch.bfloat16)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(77, 2 * Q), numbers(78, 2 * KV)


def wanted() -> tuple[torch.Tensor, ...]:
    """Each rank's Q, [tokens, Q] in float64, of the norm of the whole rows."""
    rows = [numbers(rank, TOKENS, Q + 2 * KV) for rank in range(2)]
    whole = torch.cat([row[:, :Q] for row in rows], dim=1).double()
    return torch.nn.functional.rms_norm(whole, (2 * Q,), weights()[0].double(), EPS).chunk(2, 1)


def norm(rank: int) -> list[torch.Tensor]:
    """MiniMax-M2's norms of Q and K in one, which leave V as it is."""
    from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP

    norms = [MiniMaxText01RMSNormTP(len(weight), EPS) for weight in weights()]
    for made, weight in zip(norms, weights(), strict=True):
        made.weight.data.copy_(weight.chunk(2)[rank])
    row = numbers(rank, TOKENS, Q + 2 * KV)
    q, k, v = MiniMaxText01RMSNormTP.forward_qkv(*norms, row.clone(), Q, KV)
    assert torch.equal(v, row[:, Q + KV :])
    return [q, k]


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    os.environ["VLLM_DIST_IDENT"] = f"commext_{port}"  # an executor of vLLM's would set it
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.minimax_rms_norm import rms_norm_tp
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(2, rank, address, rank, backend="gloo")
        parallel_state.initialize_model_parallel(2)
        group = parallel_state.get_tp_group()
        sums: list[int] = []
        summed = group.all_reduce
        group.all_reduce = lambda *args: [sums.append(1), summed(*args)][1]
        outs = [out.float().flatten().tolist() for out in norm(rank)]
    from vllm_commext.compat import reduce_rms

    found = {
        "outs": outs,
        "sums": len(sums),
        "bound": rms_norm_tp.MINIMAX_QK_NORM_MAX_TOKEN_NUM,
        "told": sorted(reduce_rms._told),
        "identity": reduce_rms.identity(),
    }
    torch.distributed.barrier()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
