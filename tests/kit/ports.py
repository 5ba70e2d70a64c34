"""Free ports that no two processes of a machine choose at the same time."""

import random
import socket

from vllm_commext.errors import CommextError

LOOPBACK = "127.0.0.1"
# Below the range that Linux hands out for outgoing connections, so that none takes a port before
# its server does.
PORTS = range(12000, 32000)
TRIES = 200
_claims: dict[int, socket.socket] = {}


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port of ``host`` that nothing listens on, and that neither this process nor another
    one that asks here is given as long as this process lives."""
    for port in random.Random().sample(PORTS, TRIES):
        if port not in _claims and _claim(port) and _is_free(host, port):
            return port
    raise CommextError(
        f"expected a free port on {host} from {PORTS.start} to {PORTS.stop - 1}, "
        f"found none in {TRIES} tries"
    )


def _claim(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0vllm-commext-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims[port] = claim
    return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
