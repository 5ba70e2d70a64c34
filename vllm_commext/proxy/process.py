"""The descriptors, the event loop and the garbage collector of the proxy's process."""

import asyncio
import gc
import importlib
import logging
import resource
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from vllm_commext.proxy.config import ProxyConfig

logger = logging.getLogger("vllm.commext.proxy")

_GC_THRESHOLDS = (20_000, 20, 20)
_OWN, _MOST = 64, 1 << 20


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run *main* on uvloop if it is installed: a token costs less there. The garbage collector
    leaves alone what is in memory by now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        uvloop = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def raise_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _MOST if soft == resource.RLIM_INFINITY else soft


def fitted(config: ProxyConfig, limit: int) -> ProxyConfig:
    """Limit requests and connections by descriptors: a request has a client and two engines."""
    in_flight = min(config.max_in_flight, max((limit - _OWN) // 3, 1))
    room = max(limit - _OWN - 2 * in_flight, 1)
    if in_flight < config.max_in_flight:
        text = "%d descriptors allow %d requests at a time and not the %d of --max-in-flight: raise"
        text += " the hard limit (LimitNOFILE= of systemd, ulimit -Hn)"
        logger.warning(text, limit, in_flight, config.max_in_flight)
    connections = min(config.max_connections, room)
    return replace(config, max_in_flight=in_flight, max_connections=connections)
