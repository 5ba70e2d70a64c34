"""LoRA adapters of a tiny Llama, seeded and written without any download."""

import json
from pathlib import Path

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj")


def write_named(folder: Path, content: str) -> Path:
    """Write an adapter that no model can load, of this content; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(folder)})
    )
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def write_lora(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter of ``model``'s queries, keys and values that changes most answers; return
    the folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    head = config["head_dim"]
    widths = (config["num_attention_heads"], *[config["num_key_value_heads"]] * 2)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, num_heads in zip(TARGETS, widths, strict=True):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (RANK, config["hidden_size"]), "lora_B": (num_heads * head, RANK)}
            for part, shape in shapes.items():
                values = torch.empty(shape).normal_(0.0, 0.12, generator=generator)
                tensors[f"{place}.{part}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
