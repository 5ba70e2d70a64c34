"""What strangers may send to the proxy's port."""

from __future__ import annotations

import gzip
import socket
import time

from tests.attack.judge import Attack, Victim
from tests.attack.proxy_victim import ProxyVictim, proxy
from vllm_commext.testing.ports import LOOPBACK

MIB = 1 << 20


def _connected(victim: Victim) -> socket.socket:
    assert isinstance(victim, ProxyVictim)
    return socket.create_connection((LOOPBACK, victim.port), timeout=10)


def _head(length: int, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *headers, "", ""]).encode()


def _gzip_bodies(victim: Victim) -> None:
    """Bodies that are a thousand times larger once they are unfolded, without an answer read."""
    body = gzip.compress(bytes(200 * MIB), 6)
    for path in ("/v1/completions", "/live", "/metrics", "/v1/models") * 5:
        with _connected(victim) as attacker:
            attacker.sendall(_head(len(body), "Content-Encoding: gzip", path=path) + body)
            time.sleep(0.2)


ATTACKS = (Attack("gzip", "proxy", proxy, _gzip_bodies),)
