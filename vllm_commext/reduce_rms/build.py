"""The kernel's source."""

from vllm_commext.gpu.nvrtc import Program

PROGRAM = Program("reduce_rms")
