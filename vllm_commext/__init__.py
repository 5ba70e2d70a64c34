"""Communication extensions for vLLM, loaded through its plugin entry point.

Importing this package is cheap on purpose: vLLM loads plugins in every process, even for
``vllm serve --help``, so neither torch, vLLM nor numpy is imported here.
"""

from vllm_commext.errors import (
    CommextError,
    CommextTimeoutError,
    ConfigError,
    ProtocolError,
    UnsupportedError,
)

__version__ = "0.4.0"

__all__ = [
    "CommextError",
    "CommextTimeoutError",
    "ConfigError",
    "ProtocolError",
    "UnsupportedError",
    "__version__",
]
