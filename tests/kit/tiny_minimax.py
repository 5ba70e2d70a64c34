"""A tiny MiniMax-M2 with seeded weights: the shapes of its attention are the real model's."""

import json
import math
from pathlib import Path
from typing import Any

from tests.kit.tiny_kinds import BOS_ID, EOS_ID
from tests.kit.tiny_model import write_tokenizer

HIDDEN = 256
HEADS, KV_HEADS, HEAD_DIM = 48, 8, 128  # the real model's: vLLM's own op is right for these alone
LAYERS, EXPERTS, EXPERTS_USED, INTERMEDIATE, VOCABULARY = 3, 8, 2, 128, 512


def config() -> dict[str, Any]:
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rotary_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_USED,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a MiniMax-M2 checkpoint."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        attention, moe = f"{name}.self_attn", f"{name}.block_sparse_moe"
        found |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{attention}.q_proj.weight": (q, HIDDEN),
            f"{attention}.k_proj.weight": (kv, HIDDEN),
            f"{attention}.v_proj.weight": (kv, HIDDEN),
            f"{attention}.o_proj.weight": (HIDDEN, q),
            f"{attention}.q_norm.weight": (q,),
            f"{attention}.k_norm.weight": (kv,),
            f"{moe}.gate.weight": (EXPERTS, HIDDEN),
            f"{moe}.e_score_correction_bias": (EXPERTS,),
        }
        for expert in range(EXPERTS):
            found |= {
                f"{moe}.experts.{expert}.w1.weight": (INTERMEDIATE, HIDDEN),
                f"{moe}.experts.{expert}.w2.weight": (HIDDEN, INTERMEDIATE),
                f"{moe}.experts.{expert}.w3.weight": (INTERMEDIATE, HIDDEN),
            }
    return found


def write_minimax(folder: Path) -> Path:
    """Write the model for GPUs; return its folder. The data type is bfloat16.

    Its weights keep the size of what goes through them, so that the logits depend on the prompt.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes().items():
        drawn = torch.randn(*shape, generator=generator)
        if name.endswith("correction_bias"):
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = 1.0 + 0.3 * drawn
        else:
            width = 1.0 if "embed" in name else 1.5 / math.sqrt(shape[-1])
            tensors[name] = drawn * width
    dtypes = {name: torch.float32 if "bias" in name else torch.bfloat16 for name in tensors}
    save_file(
        {name: tensor.to(dtypes[name]).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    write_tokenizer(folder, VOCABULARY)
    return folder
