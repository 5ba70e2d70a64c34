"""File descriptors: as many as this process may have, requests that fit them, and telling their
lack from an engine's fault."""

import errno
import logging
import resource
from dataclasses import replace

from vllm_commext.proxy.config import ProxyConfig

logger = logging.getLogger("vllm.commext.proxy")

_OWN = 64
_MOST = 1 << 20
# What this host or process lacks, and no engine can help.
_LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))


def raise_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _MOST if soft == resource.RLIM_INFINITY else soft


def fitted(config: ProxyConfig, limit: int) -> ProxyConfig:
    """*config* with no more requests and connections than *limit* descriptors allow: a request has
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


def lack(error: BaseException | None) -> str:
    """What this host lacks, if that is why *error* came; "" if not."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LACKS:
            return error.strerror or errno.errorcode[error.errno]
        error = error.__cause__ or error.__context__
    return ""
