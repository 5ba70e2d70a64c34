"""Models that are made on the spot: the tiny ones of the tests, and some for GPUs with layers as
large as real ones, whose weights vLLM draws by itself."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import repository  # noqa: F401

from tests.kit.tiny_kinds import BOS_ID, EOS_ID, KINDS
from tests.kit.tiny_model import write_tiny_model, write_tokenizer

NUM_TOKENS = 32000
_COMMON: Mapping[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}
LARGE: Mapping[str, Mapping[str, Any]] = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 40960,
    },
    "minimax": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "hidden_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 48,  # these three are the real model's: vLLM's op needs them
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 64,
        "intermediate_size": 1536,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
    },
}
MODELS = (*KINDS, *LARGE)


def by_device(folder: Path, device: str) -> tuple[Path, list[str]]:
    """The model of most benchmarks: a tiny one on CPUs, 8B-shaped on GPUs."""
    if device == "cuda":
        return write_model("8b", folder, device)
    model, options = write_model("llama", folder, device)
    return model, [*options, "--enforce-eager"]


def write_model(kind: str, folder: Path, device: str) -> tuple[Path, list[str]]:
    """Make a model of ``MODELS``; return its folder, and the options that vLLM needs for it."""
    if kind in LARGE:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**_COMMON, **LARGE[kind]}, indent=1))
        write_tokenizer(folder, NUM_TOKENS)
        return folder, ["--load-format", "dummy", "--dtype", "bfloat16"]
    options = ["--dtype", "bfloat16"] if device == "cuda" else KINDS[kind].cpu_options
    return write_tiny_model(folder, kind), options
