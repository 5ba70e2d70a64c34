"""Our message queue in place of vLLM's, at every name that vLLM has bound to the class.

vLLM has no hook for its queue. The defining module is patched first, so whatever is imported
later binds ours by itself; the two modules that may have bound the class before are patched if they
are there.
"""

import sys
from types import FunctionType
from typing import Any

from vllm_commext.compat.fits import needing_the_extension
from vllm_commext.compat.monkey_patch import INVENTORY, is_patched, original_of, patch_all, row_of
from vllm_commext.errors import UnsupportedError

DEFINED_IN = "vllm.distributed.device_communicators.shm_broadcast"
NAME = "MessageQueue"


def finding_itself(stock: type) -> type:
    """Copy vLLM's class so that its methods find it at its name, where its module has ours."""
    around = vars(sys.modules[stock.__module__])
    names = dict(around)

    def copied(value: Any) -> Any:
        if isinstance(value, staticmethod):
            return staticmethod(copied(value.__func__))
        if not isinstance(value, FunctionType) or value.__globals__ is not around:
            return value  # a wrapper that finds what it needs in the module that it is of
        copy = FunctionType(
            value.__code__, names, value.__name__, value.__defaults__, value.__closure__
        )
        copy.__kwdefaults__ = value.__kwdefaults__
        return copy

    methods = {name: copied(value) for name, value in vars(stock).items() if callable(value)}
    methods |= {"__module__": stock.__module__, "__doc__": stock.__doc__}
    names[stock.__name__] = made = type(stock.__name__, (stock,), methods)
    return made


def install() -> None:
    """Monkey-patch the class in this process; a queue with readers on other hosts is still one of
    vLLM's. UnsupportedError without the extension, or where the class was replaced already."""
    with needing_the_extension():
        from vllm_commext.compat.queue_groups import GroupMessageQueue
    symbol = f"{DEFINED_IN}:{NAME}"
    stock = original_of(symbol)
    if stock.__module__ != DEFINED_IN:
        raise UnsupportedError(f"vLLM's queue was replaced by {stock.__module__} already")
    if is_patched(row_of(symbol)):
        return
    GroupMessageQueue.stock = finding_itself(stock)
    symbols = [row.symbol for row in INVENTORY if row.symbol.endswith(f":{NAME}")]
    modules = {symbol: sys.modules.get(symbol.partition(":")[0]) for symbol in symbols}
    bound = [symbol for symbol, module in modules.items() if getattr(module, NAME, None) is stock]
    patch_all(dict.fromkeys(bound, GroupMessageQueue))
