"""An EAGLE-3 draft of a tiny Llama, seeded and written without any download.

Random drafts guess one token of many.  Where the target's and the draft's last projections favour
the same few tokens, every few guesses one is right, so that counts of accepted tokens show whether
the draft computed from the right cache.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_commext.testing.tiny_kinds import STD

WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
READ_LAYERS = (1, 2, 3)
"""Layers of the target before which the draft reads the hidden state of each token."""
FAVOURED = 8.0


def favour(model: Path, num_tokens: int) -> Path:
    """Make a tiny model's first ``num_tokens`` tokens far more likely than the others; return its
    folder."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / WEIGHTS)
    tensors[HEAD][num_tokens:] /= FAVOURED
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    return model


def write_eagle(folder: Path, model: Path, seed: int = 0) -> Path:
    """Write a draft of one layer with the last projection of ``model``; return the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    target = json.loads((model / "config.json").read_text())
    width, inner = target["hidden_size"], target["intermediate_size"]
    head = target["head_dim"]
    query, keys = (target[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    shapes = {
        "fc.weight": (width, len(READ_LAYERS) * width),
        "midlayer.self_attn.q_proj.weight": (query, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, query),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
    }
    norms = (
        "midlayer.hidden_norm",
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.empty(shape).normal_(0.0, STD, generator=generator)
        for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(width) for name in (*norms, "norm")}
    tensors[HEAD] = load_file(model / WEIGHTS)[HEAD].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    config = {
        **{name: value for name, value in target.items() if name not in ("layer_types",)},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(READ_LAYERS),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
