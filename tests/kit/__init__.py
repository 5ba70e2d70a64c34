"""What tests, benchmarks and the demo share, and no user needs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORRUPTING = "CorruptingNixlConnector"
CORRUPTING_MODULE = "tests.kit.corrupting_connector"
"""Damages what a decode engine has read; the server needs ``ROOT`` as its ``PYTHONPATH``."""
LEAKING = "LeakingNixlConnector"
"""Of the same module: keeps memory for each load that has failed."""
MARKED_CORRUPTING = "MarkedCorruptingConnector"
DAMAGE_MARK = "damaged"
"""The same, but only what requests with this mark in their id have read."""
STANDS = "COMMEXT_TEST_STANDS"
"""Names the file while which is there a worker stops in the middle of a prompt."""


def fixed_cache(num_bytes: int) -> tuple[str, ...]:
    """A server's options for a KV cache of that size, without a profile of the GPU's memory:
    engines that share a GPU would see each other's in it."""
    return ("--kv-cache-memory-bytes", str(num_bytes), "--gpu-memory-utilization", "0.05")
