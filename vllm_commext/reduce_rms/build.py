"""The kernel's source."""

from pathlib import Path

from vllm_commext.gpu.nvrtc import Program

PROGRAM = Program(
    "reduce_rms", Path(__file__).parent / "cuda", ("device_primitives.h", "numeric.h")
)
