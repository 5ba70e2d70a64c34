"""One device of Gloo's for all process groups of a process, in place of one for each.

Every Gloo group that torch makes has a device of its own, whose thread looks for events a hundred
times a second for as long as the group lives, and vLLM makes half a dozen groups in each worker. A
device can serve any number of groups: each pair of ranks has an address of its own on it. And its
thread may look later, together with other timers of its core: what arrives wakes it at once, and a
look is only for the end of the device, which therefore takes so much longer.
"""

import os
from datetime import timedelta
from typing import Any

from vllm_commext.compat.monkey_patch import is_patched, patch_all, row_of
from vllm_commext.compat.timer_slack import slack_of_new_threads
from vllm_commext.errors import UnsupportedError

SYMBOL = "torch.distributed.distributed_c10d:ProcessGroupGloo"
INTERFACES = "GLOO_SOCKET_IFNAME"  # torch looks at it whenever it makes a device
LOOK_SLACK_SECONDS = 0.04
DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's, where none is given


def sharing(stock: Any) -> Any:
    """Torch's class `stock` in every respect but one: of groups that are made with a timeout, or
    with nothing, all but the first take the first one's device, whose thread is patient."""
    first: dict[tuple[int, str], Any] = {}  # of the first group in each place, its options

    class Sharing(type):
        def __call__(
            cls, store: Any, rank: int, size: int, timeout: Any = DEFAULT_TIMEOUT, **given: Any
        ) -> Any:
            if given or not isinstance(timeout, timedelta):  # options of the caller's own
                return stock(store, rank, size, timeout, **given)
            place = (os.getpid(), os.environ.get(INTERFACES, ""))  # a fork keeps no thread
            if place not in first:
                with slack_of_new_threads(LOOK_SLACK_SECONDS):
                    group = stock(store, rank, size, timeout)
                first[place] = group.options
                return group
            options = stock._Options()
            options._timeout = timeout
            options._devices = first[place]._devices
            options._threads = first[place]._threads
            return stock(store, rank, size, options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock)

        def __getattr__(cls, name: str) -> Any:
            return getattr(stock, name)

    return Sharing(stock.__name__, (), {"__module__": stock.__module__, "__doc__": stock.__doc__})


def install() -> None:
    """Monkey-patch torch's class in this process; a second call changes nothing.

    Groups that are there already keep their devices.

    Raises:
        UnsupportedError: torch has no Gloo, or its groups do not tell their devices.
    """
    from torch.distributed import distributed_c10d

    row = row_of(SYMBOL)
    stock: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if stock is None:
        raise UnsupportedError("this torch is built without Gloo")
    if is_patched(row):
        return
    options = getattr(stock, "_Options", None)
    missing = [name for name in ("_devices", "_threads", "_timeout") if not hasattr(options, name)]
    if missing:
        raise UnsupportedError(f"the options of torch's Gloo groups have no {', '.join(missing)}")
    patch_all({SYMBOL: sharing(stock)})
