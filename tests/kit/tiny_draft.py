"""Drafts of a tiny Llama, seeded and written without any download: an EAGLE-3 head, and one MTP
module.

Random drafts guess one token of many. Where the target's and the draft's last projections favour
the same few tokens, every few guesses one is right, so that counts of accepted tokens show whether
the draft computed from the right cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kit.tiny_kinds import STD

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
READ_LAYERS = (1, 2, 3)
"""Layers of the target before which the draft reads the hidden state of each token."""
FAVOURED = 8.0
MTP_NORMS = (
    "token_layernorm",
    "hidden_layernorm",
    "final_layernorm",
    "input_layernorm",
    "post_attention_layernorm",
)


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
    tensors = {**_matrices(shapes, seed), **_norms((*norms, "norm"), width)}
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


def add_mtp(model: Path, seed: int = 0) -> Path:
    """Make a tiny Llama a MiMo, which is a Qwen2 with an MTP module behind it; return its folder.

    Its own weights stay, so do its answers: a Qwen2 is a Llama with biases, and these are zero."""
    import torch
    from safetensors.torch import load_file, save_file

    path = model / "config.json"
    target = json.loads(path.read_text())
    width, inner = target["hidden_size"], target["intermediate_size"]
    sizes = {
        name: target[f"num_{heads}_heads"] * target["head_dim"]
        for name, heads in (("q", "attention"), ("k", "key_value"), ("v", "key_value"))
    }
    module = "model.mtp_layers.0."
    layers = [f"model.layers.{number}." for number in range(target["num_hidden_layers"])]
    shapes = {
        f"{module}input_proj.weight": (width, 2 * width),
        f"{module}self_attn.o_proj.weight": (width, sizes["q"]),
        f"{module}mlp.gate_proj.weight": (inner, width),
        f"{module}mlp.up_proj.weight": (inner, width),
        f"{module}mlp.down_proj.weight": (width, inner),
    }
    for name, size in sizes.items():
        shapes[f"{module}self_attn.{name}_proj.weight"] = (size, width)
    tensors = {**load_file(model / WEIGHTS), **_matrices(shapes, seed)}
    tensors |= _norms([f"{module}{name}" for name in MTP_NORMS], width)
    for layer in (*layers, module):
        for name, size in sizes.items():
            tensors[f"{layer}self_attn.{name}_proj.bias"] = torch.zeros(size)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    config = {
        **target,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    }
    path.write_text(json.dumps(config))
    return model


def _matrices(shapes: Mapping[str, tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).normal_(0.0, STD, generator=generator)
        for name, shape in shapes.items()
    }


def _norms(names: Sequence[str], width: int) -> dict[str, torch.Tensor]:
    import torch

    return {f"{name}.weight": torch.ones(width) for name in names}
