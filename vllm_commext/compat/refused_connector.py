"""Stands in for a connector that was refused: whoever asks for it by name gets the reason.

Without it vLLM would call the name unknown, and the reason would be lost in the log.
"""

from typing import Any

from vllm_commext import status
from vllm_commext.errors import UnsupportedError


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refused = status.find("nixl")
    reason = refused.reason if refused else "it was not registered in this process"
    raise UnsupportedError(f"{name} was asked for by name and cannot run: {reason}")
