"""Clients as plain as can be, so that what is measured is what stands between them and the engine.

All instants are of the monotonic clock, which every process of one machine shares.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

BOUND_SECONDS = 120.0


@dataclass
class Samples:
    """What clients saw. first_token: seconds from sending a request to its first event; transit:
    seconds from the engine's sending of an event to its arrival here, first events left out."""

    first_token: list[float] = field(default_factory=list[float])
    transit: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    num_requests: int = 0
    num_failed: int = 0


def _request(port: int, body: bytes) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client:
    """One client on one kept connection to 127.0.0.1 *port*."""

    def __init__(self, port: int, samples: Samples) -> None:
        self._port = port
        self._samples = samples
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, body: dict[str, Any] | bytes) -> None:
        """Send one request and read its answer to the end, within `BOUND_SECONDS`."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            await asyncio.wait_for(self._ask(raw), BOUND_SECONDS)
        except (TimeoutError, OSError, EOFError, ValueError):
            self._samples.num_failed += 1
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _ask(self, raw: bytes) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        began = time.monotonic_ns()
        self._writer.write(_request(self._port, raw))
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ValueError(head)
        if b"chunked" in head:
            await self._read_chunks(began)
        else:
            length = next(part for part in head.split(b"\r\n") if b"content-length" in part)
            await self._reader.readexactly(int(length.split(b":")[1]))
        self._samples.num_requests += 1

    async def _read_chunks(self, began: int) -> None:
        is_first = True
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            data = await self._reader.readexactly(size + 2)
            now = time.monotonic_ns()
            for event in data.split(b"\n\n"):
                if not event.startswith(b'data: {"sent":'):
                    continue
                self._samples.num_tokens += 1
                if is_first:
                    self._samples.first_token.append((now - began) / 1e9)
                else:
                    sent = int(event[14 : event.index(b",")])
                    self._samples.transit.append((now - sent) / 1e9)
                is_first = False
        await self._reader.readexactly(2)


async def run_clients(
    port: int, num_clients: int, body: dict[str, Any], seconds: float, spread: float = 0.0
) -> Samples:
    """*num_clients* that ask again and again, started evenly over *spread* seconds (0: over one
    interval), for *seconds*."""
    samples = Samples()
    end = time.monotonic() + seconds

    async def one(delay: float) -> None:
        client = Client(port, samples)
        await asyncio.sleep(delay)
        while time.monotonic() < end:
            await client.ask(body)
        client.close()

    spread = spread or float(body.get("token_interval", 0.0)) or 0.02
    await asyncio.gather(*(one(spread * idx / num_clients) for idx in range(num_clients)))
    return samples
