"""Architectures of the tiny models, small in every dimension.

What they have in common: a byte-level vocabulary; no choice between experts, which would turn
rounding into other tokens, but in kinds that say so; heads, groups and widths that two
tensor-parallel ranks can share, but for those that a kind has only one of on purpose; rotary
positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_BYTES = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
NUM_TOKENS = NUM_BYTES + len(SPECIAL_TOKENS)
PAD_ID, BOS_ID, EOS_ID = range(NUM_BYTES, NUM_TOKENS)
MAX_POSITIONS = 4096
STD = 0.12
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"

# What every architecture calls by the same name; a kind's own fields win.
COMMON_FIELDS: Mapping[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


@dataclass(frozen=True)
class Kind:
    """One architecture: its configuration, and how wide its weights are drawn.

    ``model_type`` is transformers' name of it and ``fields`` its configuration beyond
    ``COMMON_FIELDS``. ``attention_out_std`` is the standard deviation of the projection behind
    attention; all other matrices have ``STD``. Attention averages over the prompt: where few layers
    have it, one token of many would not show at that width. Vectors (norms, biases) keep what the
    architecture's own initialisation gives them. ``cpu_dtype`` is the ``--dtype`` that vLLM's CPU
    kernels compute the architecture in, and ``cpu_attention`` the ``--attention-backend`` where
    vLLM's choice depends on the processor. ``gpu_options`` are what an engine on GPUs is to be
    given. ``chooses_experts``: which experts compute a token depends on its rounding, so that
    engines of different tensor-parallel sizes may differ in whole tokens. ``renames``: patterns of
    names that transformers gives to tensors, and what published checkpoints call them."""

    model_type: str
    meaning: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    attention_out_std: float = STD
    cpu_dtype: str = "float32"
    cpu_attention: str = ""
    gpu_options: Sequence[str] = ()
    chooses_experts: bool = False
    renames: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def cpu_options(self) -> list[str]:
        backend = ["--attention-backend", self.cpu_attention] if self.cpu_attention else []
        return ["--dtype", self.cpu_dtype, *backend]


def _granite(num_groups: int) -> Kind:
    return Kind(
        "granitemoehybrid",
        f"hybrid: 4 Mamba2 layers (groups: {num_groups}), 2 attention layers",
        {
            **_mamba2(num_groups),
            "num_hidden_layers": 6,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL],
            "position_embedding_type": "rope",
            "attention_multiplier": 32**-0.5,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
        },
        attention_out_std=0.24,
    )


def _mamba2(num_groups: int) -> dict[str, Any]:
    return {
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": num_groups,
        "mamba_expand": 2,
    }


DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_POSITIONS // 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

ALWAYS = ("llama", "swa", "granite1")
"""The kinds that `make test` has servers of."""

KINDS: Mapping[str, Kind] = {
    "llama": Kind(
        "llama", "dense, grouped-query attention: 8 heads, 4 KV heads, 4 layers", {"head_dim": 32}
    ),
    "llama1": Kind(
        "llama",
        "dense, multi-query attention: 8 heads, 1 KV head, 4 layers",
        {"head_dim": 32, "num_key_value_heads": 1},
    ),
    "swa": Kind(
        "gemma3_text",
        "3 layers of sliding-window attention over 64 tokens, 1 of full attention",
        {
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "sliding_window": 64,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
        },
    ),
    "mla": Kind(
        "deepseek_v2",
        "dense, multi-head latent attention: latent of 512 + 64, 4 layers",
        {
            "first_k_dense_replace": 4,
            "num_key_value_heads": 8,
            "q_lora_rank": None,
            # The one size of latent that vLLM's CPU kernel takes.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            # The sizes of DeepSeek's own, without which no kernel for GPUs takes a prompt.
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            # Scaled, as DeepSeek's own: vLLM's CPU kernel for plain rotary positions counts the
            # rows of MLA's three-dimensional query wrongly and rotates others.
            "rope_parameters": DEEPSEEK_ROPE,
        },
        # Where the processor has AMX, vLLM takes kernels that have no float32.
        cpu_attention="CPU_MLA",
    ),
    "granite": _granite(num_groups=2),
    "granite1": _granite(num_groups=1),
    "nemotron": Kind(
        "nemotron_h",
        "hybrid: 3 Mamba2 layers of 2 groups, 2 attention layers, 2 MLP layers",
        {
            "num_hidden_layers": 7,
            "layers_block_type": [LINEAR, FULL, LINEAR, "mlp", LINEAR, FULL, "mlp"],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "falcon": Kind(
        "falcon_h1",
        "hybrid: 3 layers of Mamba2 of 2 groups beside attention",
        {
            **_mamba2(num_groups=2),
            "num_hidden_layers": 3,
            "mamba_d_ssm": 512,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "qwen3next": Kind(
        "qwen3_next",
        "hybrid: 2 gated delta net layers, 2 attention layers",
        {
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            # vLLM insists on one layer with experts; its router takes both of them always.
            "mlp_only_layers": [0, 1, 2],
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            # The one size that FlashInfer's kernel for prompts takes, which vLLM chooses on Hopper.
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        attention_out_std=0.96,
        cpu_dtype="bfloat16",
        # FlashInfer's has to be compiled for minutes first.
        gpu_options=("--gdn-prefill-backend", "triton"),
    ),
    "gptoss": Kind(
        "gpt_oss",
        "2 layers of attention over 64 tokens, 2 of full attention, all with sinks; 4 experts",
        {
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "sliding_window": 64,
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
        },
    ),
    "mixtral": Kind(
        "mixtral",
        "grouped-query attention; 2 of 8 experts a token",
        {
            "head_dim": 32,
            "intermediate_size": 256,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        chooses_experts=True,
    ),
    "dsv32": Kind(
        "deepseek_v32",
        "multi-head latent attention to 512 tokens that an indexer with a cache of its own chooses",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 256,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 512,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "kimi": Kind(
        "kimi_linear",
        "hybrid: 3 layers of Kimi delta attention, 1 of latent attention without positions",
        {
            "first_k_dense_replace": 3,
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "moe_intermediate_size": 256,
            "num_experts": 4,
            "num_experts_per_token": 4,
            "num_shared_experts": 1,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 4,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        attention_out_std=0.48,
        renames={r"block_sparse_moe\.(gate|up|down)_proj": r"mlp.\1_proj"},
    ),
}
