"""What servers with pipeline stages need on CPUs."""

from collections.abc import Mapping

# On a CPU, vLLM 0.32 makes the tensors between pipeline stages in the run that warms compiled code
# up, and an eager server has none. So this one believes that it compiles, and torch does not.
UNCOMPILED: Mapping[str, str | None] = {
    "TORCH_COMPILE_DISABLE": None,
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}
