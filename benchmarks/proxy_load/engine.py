"""A server that answers as a vLLM engine does and takes no time of its own to think.

`python engine.py PORT_FILE`: serves on a free loopback port, which it writes to PORT_FILE. A
request's ``max_tokens`` and ``token_interval`` (seconds, of this benchmark's own) say how many
events come and how far apart; each carries the instant at which it was sent.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_KV = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[1, 2, 3]]}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(token_ids: str) -> bytes:
    """As one of vLLM's, and with the instant of sending, in nanoseconds."""
    choice = (
        '"choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":null,'
        f'"stop_reason":null,"prompt_token_ids":null,"token_ids":{token_ids}}}]'
    )
    head = '"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","model":"m"'
    return f'data: {{"sent":{time.monotonic_ns()},{head},{choice}}}\n\n'.encode()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head.split(b" ", 2)[1].decode(), await reader.readexactly(length)


async def _stream(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(_STREAM_HEAD)
    interval = float(body.get("token_interval", 0.0))
    token_ids = "[1234]" if body.get("return_token_ids") else "null"
    due = time.monotonic()
    for _ in range(int(body["max_tokens"])):
        writer.write(_chunk(_event(token_ids)))
        await writer.drain()
        if interval:
            due += interval
            await asyncio.sleep(max(0.0, due - time.monotonic()))
    writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


async def _answer(writer: asyncio.StreamWriter, path: str, raw: bytes) -> None:
    content = b"{}"
    if path.startswith("/v1/"):
        # A body of tens of MiB is not this server's to parse: the times are the proxy's.
        body = json.loads(raw) if len(raw) < 1 << 20 else {}
        if body.get("stream"):
            await _stream(writer, body)
            return
        content = json.dumps({"choices": [{"text": "t"}], "kv_transfer_params": _KV}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    writer.write(head.encode() + b"\r\n\r\n" + content)
    await writer.drain()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await _answer(writer, *await _read_request(reader))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


async def _main(port_file: Path) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=1 << 20, backlog=2048)
    port_file.write_text(str(server.sockets[0].getsockname()[1]))
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
