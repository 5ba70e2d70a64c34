"""Blocks that a step under way may still write to are kept until that step has ended.

With async scheduling a step may be under way when a request ends or is preempted, and write to its
blocks afterwards.  That is no harm where the next user of a block computes, since its step comes
later.  A load is not ordered behind that step, which would overwrite what it has brought, so vLLM
keeps such blocks a step longer; but only on consumers (``kv_role``), as those are what loads.  A
producer that reuses what other engines hold loads, too.
"""

from typing import Any


def defer_frees(scheduler: Any) -> bool:
    """Have vLLM keep such blocks on this engine; whether it does.

    Args:
        scheduler: vLLM's, before its first step: it counts steps for that from the first one on.
    """
    deferred: bool | None = getattr(scheduler, "defer_block_free", None)
    if deferred or deferred is None:
        return deferred is not None
    if scheduler.vllm_config.max_concurrent_batches > 1:
        if scheduler.current_step:
            return False
        scheduler.defer_block_free = True
    return True
