"""Our message queue in place of vLLM's, at every name that vLLM has bound to the class.

vLLM has no hook for its queue. The defining module is rebound first, so whatever is imported
later binds ours by itself; the two modules that may have bound the class before are rebound if they
are there.
"""

import sys

from vllm_commext.compat.rebind import INVENTORY, Rebinding, is_rebound, rebind
from vllm_commext.errors import UnsupportedError

DEFINED_IN = "vllm.distributed.device_communicators.shm_broadcast"


def _rows() -> list[Rebinding]:
    return [row for row in INVENTORY if row.symbol.endswith(":MessageQueue")]


def install() -> None:
    """Rebind the class in this process; a second call changes nothing.

    Raises:
        UnsupportedError: the native extension was not built, or somebody else has replaced vLLM's
            class already.
    """
    try:
        from vllm_commext.shm.queue import MessageQueue
    except ImportError as error:
        raise UnsupportedError(
            f"the native extension vllm_commext.shm._shm_ring cannot be imported ({error}); "
            "install a wheel of vllm-commext, or build it with a C compiler at hand"
        ) from error
    from vllm.distributed.device_communicators import shm_broadcast

    rows = {row.symbol.partition(":")[0]: row for row in _rows()}
    if is_rebound(rows[DEFINED_IN]):
        return
    stock = shm_broadcast.MessageQueue
    if stock.__module__ != DEFINED_IN:
        raise UnsupportedError(f"vLLM's queue was replaced by {stock.__module__} already")
    for module, row in rows.items():
        if getattr(sys.modules.get(module), "MessageQueue", None) is stock:
            rebind(row, MessageQueue)
