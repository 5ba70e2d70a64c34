"""What strangers may send to the proxy's port."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tests.attack.judge import Attack, Victim
from tests.attack.proxy_victim import SILENT_MODELS, before, connected, head, posted, proxy
from vllm_commext.proxy.server import raise_limit

MIB = 1 << 20


def _gzip_bodies(victim: Victim) -> None:
    """Bodies that are a thousand times larger once they are unfolded, without an answer read."""
    body = gzip.compress(bytes(200 * MIB), 6)
    for path in ("/v1/completions", "/live", "/metrics", "/v1/models") * 5:
        with connected(victim) as attacker:
            attacker.sendall(head(len(body), "Content-Encoding: gzip", path=path) + body)
            time.sleep(0.2)


def _large_bodies(victim: Victim, parts: Sequence[bytes]) -> None:
    for part in parts:
        _post(victim, part[: 30 * MIB])


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


def _many(victim: Victim, number: int, data: bytes, seconds: float, more: bytes = b"") -> None:
    """So many connections that send *data*, then *more* again and again, and read nothing."""
    attackers: list[socket.socket] = []
    end = time.monotonic() + seconds
    for _ in range(number):
        with suppress(OSError):
            attacker = connected(victim)
            attackers.append(attacker)
            attacker.sendall(data)
            attacker.setblocking(False)
    while time.monotonic() < end:
        for attacker in attackers if more else ():
            with suppress(OSError):
                attacker.send(more)
        time.sleep(0.2)


def _announced(victim: Victim) -> None:
    """Bodies of 32 MiB of which nothing comes, and small ones."""
    _many(victim, 32, head(32 * MIB), 0.0)
    _many(victim, 1100, head(10), 8.0)


def _slow(victim: Victim) -> None:
    """Bodies that come a byte at a time."""
    _many(victim, 300, head(MIB) + b" " * 20_000, 10.0, b" ")


def _idle(victim: Victim) -> None:
    """More connections than the soft limit, half of them with half a head."""
    raise_limit()
    _many(victim, 600, b"", 0.0)
    _many(victim, 1200, b"GET /live HT", 8.0)


def _unread(victim: Victim) -> None:
    """Answers that nobody reads, of connections that ask for more and more."""
    asked = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50
    _many(victim, 60, asked, 10.0, asked)


def _malformed(victim: Victim) -> None:
    """What is no HTTP, as fast as it goes."""
    end = time.monotonic() + 5
    garbage = (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 50 + b"\r\n\r\n")
    while time.monotonic() < end:
        for data in garbage:
            with connected(victim) as attacker, suppress(OSError):
                attacker.sendall(data)
                attacker.recv(1 << 12)


def _poison(victim: Victim) -> None:
    """Parameters that no engine should see, in every place."""
    params: tuple[Any, ...] = ("x", 1, [1], {"a": 1}, None, True)
    for _ in range(10):
        for value in params:
            body = {"model": "m", "prompt": "hello", "max_tokens": 3, "n": 2}
            _post(victim, {**body, "vllm_xargs": {"kv_transfer_params": value}})
            _post(victim, {**body, "kv_transfer_params": value})


def _post(victim: Victim, content: Any) -> None:
    with connected(victim) as attacker, suppress(OSError):
        attacker.sendall(posted(content))
        attacker.recv(1 << 16)


def _models(victim: Victim) -> None:
    """The list of models from an engine that answers nothing."""
    _many(victim, 400, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 8.0)


ATTACKS = (
    Attack("gzip", "proxy", proxy, _gzip_bodies),
    Attack("members", "proxy", proxy, _many_members, 60.0),
    Attack("brackets", "proxy", proxy, _brackets, 60.0),
    Attack("announced", "proxy", proxy, _announced, 30.0),
    Attack("slow", "proxy", proxy, _slow),
    Attack("idle", "proxy", proxy, _idle, 30.0),
    Attack("unread", "proxy", before("--client-timeout", "5"), _unread, 20.0),
    Attack("malformed", "proxy", proxy, _malformed),
    Attack("poison", "proxy", proxy, _poison),
    Attack("models", "proxy", before(decode=[SILENT_MODELS]), _models),
)
