"""Whether vLLM runs a batch in parts, under whichever option."""

from typing import Any


def microbatches(config: Any) -> bool:
    """Whether vLLM runs a batch in parts, on several streams."""
    parallel = config.parallel_config if config is not None else None
    return bool(getattr(parallel, "enable_dbo", False)) or getattr(parallel, "ubatch_size", 0) > 1
