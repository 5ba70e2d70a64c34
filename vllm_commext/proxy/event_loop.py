"""The event loop that the proxy's processes run on."""

import asyncio
import gc
import importlib
from collections.abc import Coroutine
from typing import Any

_GC_THRESHOLDS = (20_000, 20, 20)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run *main*, on uvloop's event loop where that is installed: a token costs less there.

    What is in memory by now stays; the collector looks through it no more, and less often
    through what is new.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        uvloop = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        asyncio.run(main)
    else:
        uvloop.run(main)
