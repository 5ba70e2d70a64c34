"""What a process of the proxy runs on: the event loop, and file descriptors."""

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


_OWN = 64
_MOST = 1 << 20


def raise_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _MOST if soft == resource.RLIM_INFINITY else soft


def fitted(config: ProxyConfig, limit: int) -> ProxyConfig:
    """Limit requests and connections to what *limit* descriptors allow: a request has
    its client's connection and up to two to engines."""
    in_flight = min(config.max_in_flight, max((limit - _OWN) // 3, 1))
    room = max(limit - _OWN - 2 * in_flight, 1)
    if in_flight < config.max_in_flight:
        logger.warning(
            "%d descriptors allow %d requests at a time and not the %d of --max-in-flight: raise "
            "the hard limit (LimitNOFILE= of systemd, ulimit -Hn)",
            limit,
            in_flight,
            config.max_in_flight,
        )
    connections = min(config.max_connections, room)
    return replace(config, max_in_flight=in_flight, max_connections=connections)
