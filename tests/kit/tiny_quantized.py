"""Tiny models with quantized parts, as checkpoints of the published models have them."""

import json
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
MXFP4_BLOCK = 32
"""Numbers of four bits that share a scale."""
MXFP4_EXPONENT = 127 - 5
"""With scales of 2**-5 random numbers are about as wide as a tiny model's other weights."""
NOT_PACKED = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)


def pack_experts(model: Path, seed: int = 0) -> Path:
    """Draw the experts of a tiny gpt-oss anew, in MXFP4; return its folder."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = _load(model)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, width_in, width_out = tensors.pop(name).shape
        scales = (num_experts, width_out, width_in // MXFP4_BLOCK)
        packed = (*scales, MXFP4_BLOCK // 2)
        tensors[f"{name}_blocks"] = torch.randint(
            256, packed, dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.full(scales, MXFP4_EXPONENT, dtype=torch.uint8)
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": list(NOT_PACKED)}
    return _save(model, tensors, quantization_config=quantized)


def quantize_llama(model: Path) -> Path:
    """Turn the matrices of a tiny Llama's layers into FP8, one scale each, and give each layer
    scales of an FP8 KV cache, other ones for keys and values; return its folder."""
    import torch

    tensors: dict[str, Any] = {}
    for name, tensor in _load(model).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        wide = tensor.float()
        scale = wide.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (wide / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    config = json.loads((model / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}.self_attn"
        for number, part in enumerate("kv"):
            tensors[f"{place}.{part}_scale"] = torch.tensor(0.02 * (1 + layer + number))
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return _save(model, tensors, quantization_config=quantized)


def _load(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / WEIGHTS)


def _save(model: Path, tensors: dict[str, Any], **fields: object) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return model
