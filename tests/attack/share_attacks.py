"""Work that one client, or one engine, might have others wait for: what needs no key, what is not
counted, what is done in one piece, and what is not bounded."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tests.attack.judge import Attack, Victim
from tests.attack.proxy_attacks import MIB, held
from tests.attack.proxy_victim import (
    LiveVictim,
    ProxyVictim,
    StreamVictim,
    TlsVictim,
    before,
    connected,
    posted,
    proxy,
)
from tests.kit.ports import LOOPBACK
from tests.unit.proxy.test_proxy_access import certificate, whole_hello
from vllm_commext.proxy.process import raise_limit

SECONDS = 6.0
OTHER = "127.0.0.2"
"""Attackers' address, so that the limit of one address is theirs alone."""
PROMPT_BYTES = 200_000  # for which a stand-in engine computes 50 ms
_LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def _again_and_again(victim: Victim, data: bytes, number: int = 3) -> None:
    """Send *data* on so many connections for a while, on each when it was answered."""
    ones = [connected(victim, OTHER) for _ in range(number)]
    for one in ones:
        one.sendall(data)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for one in select.select(ones, [], [], 0.1)[0]:
            with suppress(OSError):
                if one.recv(1 << 16):
                    one.sendall(data)
                else:
                    ones.remove(one)


def _preflights(victim: Victim) -> None:
    """Questions of browsers, for which no key is needed."""
    asked = b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: https://page\r\n\r\n"
    ones = [connected(victim, OTHER) for _ in range(1200)]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for one in ones[:: max(1, len(ones) // 200)]:
            with suppress(OSError):
                one.sendall(asked)
                one.recv(1 << 14)


def _handshakes(victim: Victim) -> None:
    """TLS handshakes that stall after a whole first message, each of which costs the proxy 2 ms,
    and after a part of it; more than one address may have connections."""
    raise_limit()
    ones: list[socket.socket] = []
    for hello in (*[whole_hello()] * 2000, *[_HELLO] * 4000):
        with suppress(OSError):
            ones.append(connected(victim, OTHER))
            ones[-1].sendall(hello)
    time.sleep(SECONDS / 2)


def _objects(victim: Victim) -> None:
    """Parameters of many small lists, where they were decoded in one piece; no engine gets them."""
    lists = b"[" + b"[]," * (600 << 10) + b"[]]"
    for name in (b"vllm_xargs", b"sampling_params", b"kv_transfer_params", b"stop"):
        inner = lists if name == b"stop" else b'{"a": %s}' % lists
        body = b'{"%s": %s, "kv_transfer_params": {"remote_host": %s}}' % (name, inner, lists)
        end = time.monotonic() + SECONDS / 4
        while time.monotonic() < end:
            with connected(victim, OTHER) as one, suppress(OSError):
                one.sendall(posted(body))
                one.recv(1 << 14)


def _connections(victim: Victim) -> None:
    """More requests at once than one address may have connections: each hears of it.

    Raises:
        RuntimeError: some were reset."""
    raise_limit()
    answers: dict[str, int] = {}
    for _ in range(2):
        ones: list[socket.socket] = []
        for _ in range(2300):
            one = connected(victim, OTHER)
            one.sendall(_LIVE)
            ones.append(one)
            time.sleep(0.0005)
        for one in ones:
            try:
                told = one.recv(1 << 12)[9:12].decode() or "nothing"
            except OSError as error:
                told = type(error).__name__
            answers[told] = answers.get(told, 0) + 1
            one.close()
    if set(answers) - {"200", "503"}:
        raise RuntimeError(f"expected 200 or 503 alone, got {answers}")


def _instant(victim: Victim) -> None:
    """Nine hundred requests in one instant."""
    raise_limit()
    ones = [connected(victim, OTHER) for _ in range(900)]
    body = posted({"prompt": "hello", "max_tokens": 3})
    for _ in range(2):
        for one in ones:
            one.sendall(body)
        for one in ones:
            one.recv(1 << 14)


def _engines(victim: Victim) -> None:
    """A file that names ever more engines, and too many."""
    assert isinstance(victim, FileVictim)
    for number in (300, 4000, 900, 0):
        victim.name(number)
        time.sleep(SECONDS / 3)


def _stream_of(victim: Victim, content: bytes | dict[str, Any]) -> socket.socket:
    """A stream that has begun."""
    one = connected(victim, OTHER)
    one.sendall(posted(content))
    one.recv(1 << 14)
    return one


def _lost_streams(victim: Victim) -> None:
    """Streams of long prompts that lose their engines at once, and are computed again."""
    body = {"prompt": "x" * PROMPT_BYTES, "stream": True}
    ones = [_stream_of(victim, body) for _ in range(15)]
    assert isinstance(victim, ProxyVictim)
    for engine in victim.engines[1:]:
        with socket.create_connection((LOOPBACK, engine.port), 10) as told:
            told.sendall(posted({"prompt": "cut all"}))
            told.recv(1 << 14)
    for one in ones:
        while b"[DONE]" not in one.recv(1 << 14):
            pass


def _white_space(victim: Victim) -> None:
    """Streams whose bodies are white space, as much as all streams have room for."""
    body = b'{"stream": true, "prompt": %s"x"}' % (b" " * (31 * MIB))
    ones = [_stream_of(victim, body) for _ in range(8)]
    time.sleep(SECONDS / 2)
    del ones


@dataclass
class FileVictim(ProxyVictim):
    """A proxy whose engines a file names, too."""

    path: Path

    def name(self, number: int) -> None:
        urls = [f"http://127.0.0.3:{port}" for port in range(20_000, 20_000 + number)]
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"decode": urls}))
        new.rename(self.path)

    def held(self) -> Mapping[str, float]:
        return {}


@contextmanager
def by_a_file(folder: Path) -> Iterator[FileVictim]:
    path = folder / "engines.json"
    path.write_text("{}")
    with proxy(folder, "--engines-file", str(path)) as victim:
        yield FileVictim(victim.proxy, victim.engines, path)


@contextmanager
def in_order(folder: Path) -> Iterator[ProxyVictim]:
    """A proxy that sends short prompts first, and knows how fast its engine without a cache is."""
    order = ("--prompt-order", "shortest", "--no-affinity")
    with proxy(folder, *order, prefill="computing") as victim:
        for _ in range(20):
            victim.ask("POST", "/v1/completions", b'{"prompt": "%s"}' % (b"x" * PROMPT_BYTES))
        yield victim


@contextmanager
def by_tls(folder: Path) -> Iterator[ProxyVictim]:
    options = zip(("--tls-cert-file", "--tls-key-file"), map(str, certificate(folder)), strict=True)
    with proxy(folder, *chain.from_iterable(options), kind=TlsVictim) as victim:
        yield victim


_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300)
"""The first part of a TLS client's first message."""
_TOOL = {"type": "function", "function": {"name": "f", "description": "x" * PROMPT_BYTES}}
_TOOLS = posted({"messages": [], "tools": [_TOOL], "max_tokens": 3}, "/v1/chat/completions")
_FLOOD = posted({"prompt": "flood", "stream": True})
_GIVEN_UP, _FAILING = (posted({"prompt": one, "max_tokens": 3}) for one in ("abort", "fail"))
_CUTTING = {"prefill": "computing", "decode": ["cutting", "cutting"]}
_before_floods = before(decode=["flood"], kind=LiveVictim)
ATTACKS = (
    Attack("preflights", before("--max-in-flight", "32"), _preflights),
    Attack("objects", proxy, _objects),
    # An engine's metrics page has no end: nothing is to be sent for that.
    Attack("pages", before(decode=["endless-page"]), held((0, b"", SECONDS))),
    Attack("connections", proxy, _connections, 30.0),
    Attack("instant", before(kind=LiveVictim), _instant, 30.0),
    Attack("engines", by_a_file, _engines),
    Attack("unread_streams", _before_floods, held((100, _FLOOD, SECONDS, b"", OTHER))),
    Attack("given_up", before(decode=["moody"]), partial(_again_and_again, data=_GIVEN_UP)),
    Attack("failing", before(decode=["moody"]), partial(_again_and_again, data=_FAILING)),
    Attack("tools", in_order, partial(_again_and_again, data=_TOOLS, number=5), by_median=True),
    Attack("handshakes", by_tls, _handshakes, 30.0),
    Attack("lost_streams", before("--no-affinity", **_CUTTING), _lost_streams),
    Attack("white_space", before(kind=StreamVictim, **_CUTTING), _white_space, 30.0),
)
