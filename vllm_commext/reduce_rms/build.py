"""The kernel's source and its arguments."""

import ctypes

from vllm_commext.gpu.arguments import arguments_type
from vllm_commext.gpu.nvrtc import Program

PROGRAM = Program("reduce_rms")


def make_arguments(**fields: float) -> ctypes.Structure:
    """Return the kernel's ``Args``; fields that are not given are 0."""
    return arguments_type(PROGRAM.main.name)(**fields)
