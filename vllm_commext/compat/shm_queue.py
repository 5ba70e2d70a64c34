"""Our message queue in place of vLLM's, at every name that vLLM has bound to the class.

vLLM has no hook for its queue. The defining module is rebound first, so whatever is imported
later binds ours by itself; the two modules that may have bound the class before are rebound if they
are there.
"""

import sys

from vllm_commext.compat.native import needing_the_extension
from vllm_commext.compat.rebind import INVENTORY, is_rebound, rebind_all, row_of
from vllm_commext.errors import UnsupportedError

DEFINED_IN = "vllm.distributed.device_communicators.shm_broadcast"
NAME = "MessageQueue"


def install() -> None:
    """Rebind the class in this process; a second call changes nothing.

    Raises:
        UnsupportedError: the native extension was not built, or somebody else has replaced vLLM's
            class already.
    """
    with needing_the_extension():
        from vllm_commext.compat.queue_groups import GroupMessageQueue
    from vllm.distributed.device_communicators import shm_broadcast

    if is_rebound(row_of(f"{DEFINED_IN}:{NAME}")):
        return
    stock = shm_broadcast.MessageQueue
    if stock.__module__ != DEFINED_IN:
        raise UnsupportedError(f"vLLM's queue was replaced by {stock.__module__} already")
    symbols = [row.symbol for row in INVENTORY if row.symbol.endswith(f":{NAME}")]
    modules = {symbol: sys.modules.get(symbol.partition(":")[0]) for symbol in symbols}
    bound = [symbol for symbol, module in modules.items() if getattr(module, NAME, None) is stock]
    rebind_all(dict.fromkeys(bound, GroupMessageQueue))
