"""The kernel's source."""

from pathlib import Path

from vllm_commext.gpu.nvrtc import PRIMITIVES, Program

FOLDER = Path(__file__).parent / "cuda"
PROGRAM = Program("reduce_rms", FOLDER, (PRIMITIVES, FOLDER / "numeric.h"))
