"""A light stand-in for ``vllm serve``: it takes a moment to start, answers with slow streams, and
has what a real engine leaves where it is not ended well: a core process that SIGTERM does not end,
shared memory and a socket. Run as ``vllm.entrypoints.cli.main`` by a copy on PYTHONPATH."""

import asyncio
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

CORE = "core"
NUM_TOKENS, TOKEN_SECONDS = 30, 0.03


def core(name: str) -> None:
    """Hold shared memory and a socket until killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Path(name).open("w+b") as file:
        file.truncate(4096)
        held = mmap.mmap(file.fileno(), 4096)
        one = socket.socket(socket.AF_UNIX)
        one.bind(f"{os.environ['VLLM_RPC_BASE_PATH']}/{os.getpid()}")
        while held:
            time.sleep(60)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].split("\r\n")[0]
    await reader.readexactly(int(length or 0))
    kind = "text/event-stream" if head.startswith("post") else "text/plain"
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())
    if head.startswith("post"):
        for number in range(NUM_TOKENS):
            choice = {"index": 0, "text": f" {number}", "token_ids": [number]}
            writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(TOKEN_SECONDS)
        writer.write(b"data: [DONE]\n\n")
    writer.close()


async def serve(port: int) -> None:
    ends = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await ends.wait()
    server.close()


def main() -> None:
    if sys.argv[1] == CORE:
        core(sys.argv[2])
        return
    time.sleep(random.uniform(0.0, 0.4))
    name = f"/dev/shm/{os.environ['COMMEXT_TEST_MARK']}-{os.getpid()}"
    held = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.cli.main", CORE, name])
    time.sleep(random.uniform(0.0, 0.4))
    asyncio.run(serve(int(sys.argv[sys.argv.index("--port") + 1])))
    held.kill()
    held.wait()
    Path(name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
