"""One of two ranks with the norms of spread rows of vLLM's models; test_qk_norms.py starts it.

    python tests/contract/qk_norms_rank.py RANK PORT

Prints as JSON, by model, what its norm gives. Each layer is made by its own constructor; what the
attentions have beside the norm and the projection is left out.
"""

import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

TOKENS, HEADS, KV_HEADS, HEAD, EPS = 5, 4, 2, 16, 1e-6
Q, KV = HEADS * HEAD // 2, KV_HEADS * HEAD // 2  # of a rank


def numbers(seed: int, *shape: int) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device(), torch.bfloat16)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(77, 2 * Q), numbers(78, 2 * KV)


def wanted() -> tuple[torch.Tensor, ...]:
    """Each rank's Q, [tokens, Q] in float64, of the norm of the whole rows."""
    rows = [numbers(rank, TOKENS, Q + 2 * KV) for rank in range(2)]
    whole = torch.cat([row[:, :Q] for row in rows], dim=1).double()
    return torch.nn.functional.rms_norm(whole, (2 * Q,), weights()[0].double(), EPS).chunk(2, 1)


def config() -> Any:
    return SimpleNamespace(
        hidden_size=HEADS * HEAD,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=64,
        rms_norm_eps=EPS,
        layer_norm_eps=EPS,
        attention_layer_norm=True,
        use_qk_norm=True,
        qk_norm_type="olmo",
        qkv_bias=False,
        rope_theta=1e4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rope_scaling_layers=None,
    )


def by_attention(rank: int) -> list[torch.Tensor]:
    """OLMoE's own attention, without what attends and what rotates."""
    from vllm.model_executor.models import olmoe

    module: Any = olmoe
    module.Attention = module.get_rope = lambda *_, **__: torch.nn.Identity()
    model = SimpleNamespace(hf_config=config())
    whole = SimpleNamespace(model_config=model, cache_config=None, quant_config=None)
    made = module.OlmoeAttention(vllm_config=whole, prefix="model.layers.0")
    made.q_norm.weight.data, made.k_norm.weight.data = weights()
    made.q_norm.variance_epsilon = made.k_norm.variance_epsilon = EPS
    q, k, _ = numbers(rank, TOKENS, Q + 2 * KV).split([Q, KV, KV], dim=-1)
    return list(made._apply_qk_norm(q, k))


def by_transformers(rank: int) -> list[torch.Tensor]:
    """Olmo2's norms as the backend makes them of those of Hugging Face's, and one of a head."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from vllm.model_executor.models.transformers.fusers.rms_norm import RMSNormFuser
    from vllm.model_executor.models.transformers.fx_utils import trace

    model = SimpleNamespace(get_head_size=lambda: HEAD, dtype=torch.bfloat16)
    whole = SimpleNamespace(model_config=model)

    def norm(name: str, weight: torch.Tensor) -> Any:
        theirs = Olmo2RMSNorm(len(weight), EPS)
        graph = trace(theirs)
        assert graph is not None
        fuser = RMSNormFuser.match(graph, theirs)
        made = fuser.fuse(theirs, f"model.layers.0.{name}", whole)
        made.weight.data = weight
        return made

    q_weight, k_weight = weights()
    row = numbers(rank, 1, TOKENS, Q + 2 * KV)
    outs = [
        norm("self_attn.q_norm", q_weight)(row[..., :Q]),
        norm("self_attn.k_norm", k_weight)(row[..., Q : Q + KV]),
        norm("post_attention_layernorm", q_weight)(numbers(5, 1, TOKENS, 2 * Q)),
        norm("self_attn.q_norm", q_weight[:HEAD])(row[..., :HEAD]),
    ]
    assert all(out.shape[:2] == (1, TOKENS) for out in outs)
    return outs


def by_fused_op(rank: int) -> list[torch.Tensor]:
    """MiniMax-M2's norms of Q and K in one, which leave V as it is."""
    from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP, rms_norm_tp

    norms = [MiniMaxText01RMSNormTP(len(weight), EPS) for weight in weights()]
    for norm, weight in zip(norms, weights(), strict=True):
        norm.weight.data.copy_(weight.chunk(2)[rank])
    row = numbers(rank, TOKENS, Q + 2 * KV)
    q, k, v = MiniMaxText01RMSNormTP.forward_qkv(*norms, row.clone(), Q, KV)
    assert torch.equal(v, row[:, Q + KV :])
    bounds.append(rms_norm_tp.MINIMAX_QK_NORM_MAX_TOKEN_NUM)
    return [q, k]


bounds: list[int] = []
CASES: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "MiniMax-M2": by_fused_op,
    "OLMoE": by_attention,
    "the Transformers backend": by_transformers,
}


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    os.environ["VLLM_DIST_IDENT"] = f"commext_{port}"  # an executor of vLLM's would set it
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(2, rank, address, rank, backend="gloo")
        parallel_state.initialize_model_parallel(2)
        group = parallel_state.get_tp_group()
        gathered: list[str] = []
        stock, summed = group.all_gather, group.all_reduce
        group.all_gather = lambda *args: [gathered.append("gather"), stock(*args)][1]
        group.all_reduce = lambda *args: [gathered.append("sum"), summed(*args)][1]
        found: dict[str, Any] = {}
        for name, case in CASES.items():
            gathered.clear()
            found[name] = {
                "outs": [out.float().flatten().tolist() for out in case(rank)],
                "collectives": list(gathered),
            }
    from vllm_commext.compat import reduce_rms

    found["bounds"] = bounds
    found["told"] = sorted(reduce_rms._told)
    found["identity"] = reduce_rms.identity()
    torch.distributed.barrier()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
