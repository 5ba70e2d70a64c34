"""What strangers may send to the proxy's port."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from tests.attack.judge import Attack, Victim
from tests.attack.proxy_victim import ProxyVictim, proxy
from tests.kit.ports import LOOPBACK
from vllm_commext.proxy.server import raise_limit

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


def _large_bodies(victim: Victim, parts: Sequence[bytes]) -> None:
    for part in parts:
        body = part[: 30 * MIB]
        with _connected(victim) as attacker, suppress(OSError):
            attacker.settimeout(10)
            attacker.sendall(_head(len(body)) + body)
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


def _many(victim: Victim, number: int, data: bytes, seconds: float, more: bytes = b"") -> None:
    """So many connections that send *data*, then *more* again and again, and read nothing."""
    attackers: list[socket.socket] = []
    end = time.monotonic() + seconds
    for _ in range(number):
        with suppress(OSError):
            attacker = _connected(victim)
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
    _many(victim, 32, _head(32 * MIB), 0.0)
    _many(victim, 1100, _head(10), 8.0)


def _slow(victim: Victim) -> None:
    """Bodies that come a byte at a time."""
    _many(victim, 300, _head(MIB) + b" " * 20_000, 10.0, b" ")


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
            with _connected(victim) as attacker, suppress(OSError):
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
    body = json.dumps(content).encode()
    with _connected(victim) as attacker, suppress(OSError):
        attacker.sendall(_head(len(body)) + body)
        attacker.recv(1 << 16)


def _models(victim: Victim) -> None:
    """The list of models from an engine that answers nothing."""
    _many(victim, 400, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 8.0)


def _impatient(folder: Path) -> AbstractContextManager[Victim]:
    return proxy(folder, "--client-timeout", "5")


def _before_silent_models(folder: Path) -> AbstractContextManager[Victim]:
    return proxy(folder, decode="silent-models")


ATTACKS = (
    Attack("gzip", "proxy", proxy, _gzip_bodies),
    Attack("members", "proxy", proxy, _many_members, 60.0),
    Attack("brackets", "proxy", proxy, _brackets, 60.0),
    Attack("announced", "proxy", proxy, _announced, 30.0),
    Attack("slow", "proxy", proxy, _slow),
    Attack("idle", "proxy", proxy, _idle, 30.0),
    Attack("unread", "proxy", _impatient, _unread, 20.0),
    Attack("malformed", "proxy", proxy, _malformed),
    Attack("poison", "proxy", proxy, _poison),
    Attack("models", "proxy", _before_silent_models, _models),
)
