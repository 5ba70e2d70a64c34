"""One of two ranks with MiniMax-M2's norm at TP2; test_reduce_rms.py starts it.

    python tests/contract/reduce_rms_rank.py RANK PORT

Prints as JSON what the norms give.
"""

import json
import os
import sys

import torch

TOKENS, Q, KV, EPS = 5, 64, 16, 1e-6


def rows(rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS, Q + 2 * KV, generator=random).to(torch.bfloat16)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(77)
    return torch.randn(2 * Q, generator=random), torch.randn(2 * KV, generator=random)


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    os.environ["VLLM_DIST_IDENT"] = f"commext_{port}"  # an executor of vLLM's would set it
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(2, rank, address, rank, backend="gloo")
        parallel_state.initialize_model_parallel(2)
        from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP

        q_weight, k_weight = weights()
        q_norm, k_norm = (MiniMaxText01RMSNormTP(w.numel(), EPS) for w in (q_weight, k_weight))
        for norm, weight in ((q_norm, q_weight), (k_norm, k_weight)):
            norm.weight.data.copy_(weight.chunk(2)[rank])
        with torch.no_grad():
            q, k, v = MiniMaxText01RMSNormTP.forward_qkv(q_norm, k_norm, rows(rank), Q, KV)
        own = rows(rank)[:, Q + KV :]
    from vllm_commext.compat import reduce_rms

    found = {
        "minimax": [q.float().tolist(), k.float().tolist()],
        "v_is_left": bool(torch.equal(v, own)),
        "told": sorted(reduce_rms._told),
    }
    torch.distributed.barrier()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
