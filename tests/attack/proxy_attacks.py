"""What strangers may send to the proxy's port."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tests.attack.judge import Attack, Victim
from tests.attack.proxy_victim import before, connected, head, posted, proxy
from vllm_commext.proxy.process import raise_limit

MIB = 1 << 20


def _large_bodies(victim: Victim, parts: Sequence[bytes]) -> None:
    for part in parts:
        with connected(victim) as attacker, suppress(OSError):
            attacker.sendall(posted(part[: 30 * MIB]))
            attacker.recv(1 << 16)


def _many_members(victim: Victim) -> None:
    """Many short members, and long ones of many small values."""
    short = b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}"
    long = b"{" + b",".join(b'"%d":[%s1]' % (n, b"[]," * 20_000) for n in range(300)) + b"}}"
    _large_bodies(victim, (short, long, b'{"model":"m"' + b',"":1' * 5_000_000 + b"}"))


def _brackets(victim: Victim) -> None:
    """Deep JSON, brackets, quotes and escapes without end."""
    size = 30 * MIB
    inside = (b"[]," * (size // 3), b'"",' * (size // 3), b"[" * size, b'{"a":' * (size // 5))
    prompts = [b'{"prompt": [' + part for part in inside]
    _large_bodies(victim, [*prompts, b'{"prompt": "' + b'\\"' * (size // 2), b"{" + b" " * size])


def _many(
    victim: Victim, number: int, data: bytes, seconds: float, more: bytes = b"", *host: str
) -> None:
    """So many connections that send *data*, then *more* again and again, and read nothing."""
    attackers: list[socket.socket] = []
    end = time.monotonic() + seconds
    for _ in range(number):
        with suppress(OSError):
            attacker = connected(victim, *host)
            attackers.append(attacker)
            attacker.sendall(data)
            attacker.setblocking(False)
    while time.monotonic() < end:
        for attacker in attackers if more else ():
            with suppress(OSError):
                attacker.send(more)
        time.sleep(0.2)


def held(*many: Any) -> Callable[[Victim], None]:
    def assault(victim: Victim) -> None:
        raise_limit()
        for one in many:
            _many(victim, *one)

    return assault


_ASKED = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50
_UNREAD = (60, _ASKED, 10.0, _ASKED)
_MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
_ANNOUNCED = (32, head(32 * MIB), 0.0), (1100, head(10), 8.0)
"""Bodies of 32 MiB of which nothing comes, and small ones."""
_SLOW = (300, head(MIB) + b" " * 20_000, 10.0, b" ")
_IDLE = (600, b"", 0.0), (1200, b"GET /live HT", 8.0)
"""More than the soft limit, half of them with half a head."""
ATTACKS = (
    Attack("members", proxy, _many_members, 60.0),
    Attack("brackets", proxy, _brackets, 60.0),
    Attack("announced", proxy, held(*_ANNOUNCED), 30.0),
    Attack("slow", proxy, held(_SLOW)),
    Attack("idle", proxy, held(*_IDLE), 30.0),
    Attack("unread", before("--client-timeout", "5"), held(_UNREAD), 20.0),
    Attack("models", before(decode=["silent-models"]), held((400, _MODELS, 8.0))),
)
