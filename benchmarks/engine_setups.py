"""What is compared by `benchmarks/fused_engine.py`, and on which model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dense_engine import SMALL

VLLM, AGAIN, OURS, AUTO = "vllm", "vllm again", "ours", "ours, auto"
ALLREDUCE, NORM = "VLLM_COMMEXT_ALLREDUCE", "VLLM_COMMEXT_REDUCE_RMS"
_OFF = {ALLREDUCE: "0", NORM: "0"}
TOGGLES: Mapping[str, Mapping[str, str]] = {
    VLLM: _OFF,
    AGAIN: _OFF,
    OURS: {**_OFF, ALLREDUCE: "1"},
    AUTO: {**_OFF, ALLREDUCE: "auto"},
}
NORM_TOGGLES = {VLLM: _OFF, AGAIN: _OFF, OURS: {**_OFF, NORM: "1"}, AUTO: {**_OFF, NORM: "auto"}}


class Setup(NamedTuple):
    """What is compared, and on which model.

    Attributes:
        name: of the report.
        engines: to start, if none are named; the first one is what others are compared with.
        chunk: tokens of the long prompt.
        shape: of the model; what else its configuration has.
        toggles: ours, by engine.
    """

    name: str
    engines: tuple[str, ...]
    chunk: int
    shape: Mapping[str, Any]
    toggles: Mapping[str, Mapping[str, str]] = TOGGLES


# A Llama 3 of 70B but for the number of its layers.
_LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
# MiniMax-M2 but for the numbers of its layers and experts.
_MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "num_local_experts": 12,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "vocab_size": 32000,
}
DENSE = Setup("fused_engine", (VLLM, AGAIN, OURS), 8192, _LARGE)
MINIMAX = Setup("norm_engine_minimax", (VLLM, AGAIN, OURS), 4096, _MINIMAX, toggles=NORM_TOGGLES)
MODELS = {"dense": DENSE, "minimax": MINIMAX}


def small(setup: Setup) -> Setup:
    """To try it on CPUs."""
    few = {**SMALL, "head_dim": 64, "num_local_experts": 8, "scoring_func": "softmax"}
    few["use_routing_bias"] = False
    shape = {**setup.shape, **{key: few[key] for key in few if key in {**SMALL, **setup.shape}}}
    return setup._replace(shape=shape)
