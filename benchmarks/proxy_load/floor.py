"""What a token costs at least on a machine: a relay that does nothing else.

`python floor.py bytes|aiohttp PORT TARGET_PORT`: passes on to the target and back what comes,
either bytes between uvloop's connections, without a look at them, or requests and pieces of their
answers by the client and the server of aiohttp, as this project's proxy has them.
"""

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web

HOST = "127.0.0.1"


class _Engine(asyncio.Protocol):
    """Its bytes go to the client."""

    def __init__(self, client: asyncio.WriteTransport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
    loop = asyncio.get_running_loop()
    to_engine, _ = await loop.create_connection(lambda: _Engine(writer.transport), HOST, target)
    try:
        while data := await reader.read(1 << 16):
            to_engine.write(data)
    finally:
        to_engine.close()
        writer.close()


async def by_bytes(port: int, target: int) -> None:
    server = await asyncio.start_server(lambda r, w: _relay(r, w, target), HOST, port)
    await server.serve_forever()


async def by_aiohttp(port: int, target: int) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            url = f"http://{HOST}:{target}{request.path}"
            async with session.post(url, data=await request.read()) as answer:
                response = web.StreamResponse(status=answer.status)
                await response.prepare(request)
                while piece := await answer.content.readany():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application()
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    ways = {"bytes": by_bytes, "aiohttp": by_aiohttp}
    uvloop.run(ways[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3])))
