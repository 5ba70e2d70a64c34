"""A router for vLLM's `p2p` tier: half of the engines prefill, the others decode what they fetch.

    python benchmarks/goodputs/p2p.py --port 8300 --engine URL=TIER_PORT --engine URL=TIER_PORT

Both are asked at once, or the decode engine when the prompt has been computed (`--in-turn`).  The
names in ``kv_transfer_params`` are those of vLLM 0.33's `v1/kv_offload/tiering/p2p`.
"""

import argparse
import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

LOOPBACK = "127.0.0.1"
MOST_BYTES = 1 << 28
ANSWER_SECONDS = 300.0


class Router:
    """Engines, each a URL and the port of its tier, in turns within each half."""

    def __init__(self, engines: list[tuple[str, int]], is_in_turn: bool) -> None:
        half = len(engines) // 2
        self._prefill, self._decode = (itertools.cycle(x) for x in (engines[:half], engines[half:]))
        self._is_in_turn = is_in_turn
        self._session: aiohttp.ClientSession

    async def open(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        decode, _ = next(self._decode)
        if request.method != "POST":
            return await self._pass_on(request, decode, None)
        body, key = await request.json(), uuid.uuid4().hex
        prefill, port = next(self._prefill)
        one = {**body, "max_tokens": 1, "stream": False}
        one.pop("stream_options", None)
        one["kv_transfer_params"] = {"remote_decoder": {"kv_request_id": key}}
        prompt = asyncio.create_task(self._compute(prefill + request.path, one))
        if self._is_in_turn:
            await prompt
        peer = {"kv_request_id": key, "remote_host": LOOPBACK, "remote_port": port}
        body["kv_transfer_params"] = {"remote_prefiller": peer}
        answer = await self._pass_on(request, decode, body)
        await prompt
        return answer

    async def _compute(self, url: str, body: dict[str, Any]) -> None:
        async with self._session.post(url, json=body) as answer:
            if answer.status != web.HTTPOk.status_code:
                print(f"{url}: {answer.status} {await answer.text()}", flush=True)

    async def _pass_on(
        self, request: web.Request, engine: str, body: dict[str, Any] | None
    ) -> web.StreamResponse:
        url = engine + request.path_qs
        async with self._session.request(request.method, url, json=body) as answer:
            out = web.StreamResponse(status=answer.status)
            out.content_type = answer.content_type
            await out.prepare(request)
            async for data in answer.content.iter_any():
                await out.write(data)
            return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", action="append", required=True, metavar="URL=TIER_PORT")
    parser.add_argument("--in-turn", action="store_true")
    args = parser.parse_args()
    engines = [(url, int(port)) for url, _, port in (one.rpartition("=") for one in args.engine)]
    router = Router(engines, args.in_turn)
    app = web.Application(client_max_size=MOST_BYTES)
    app.cleanup_ctx.append(router.open)
    app.router.add_route("*", "/{path:.*}", router.handle)
    web.run_app(app, host=LOOPBACK, port=args.port, print=None)


if __name__ == "__main__":
    main()
