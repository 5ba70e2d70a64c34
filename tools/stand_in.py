"""One of the simulator's engines in real time, behind vLLM's endpoints, for the real proxy.

    python -m tools.stand_in --port 8100 --number 0

Prompts are computed and answers are given in the simulator's steps. A prompt whose blocks another
engine has (``do_remote_prefill``) can be read after `Hardware.handover`. A prompt that begins as an
earlier one did is held as far as that one went.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from goodputs.simulator import Engine, Hardware, Request  # noqa: E402

from tests.kit.ports import LOOPBACK  # noqa: E402
from vllm_commext.bench.workload import Arrival  # noqa: E402

MOST_BYTES, BEGINNING = 1 << 28, 16
HARDWARE = Hardware(noise=0.1)
EVENT = b'data: {"choices":[{"index":0,"text":" a","token_ids":[5],"finish_reason":%s}]}\n\n'
INFO = (
    'vllm:commext_nixl_info{engine="0",host="127.0.0.1",port="1",seal="",streams="0",reuse="0",'
    'releases="0"} 1\n'
)
"""A connector's line on the metrics page: the proxy then lets prompts wait for their turn."""
HANDED_OVER = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[1]]}


def common(one: array[int], other: array[int]) -> int:
    """Tokens that both begin with."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


class StandIn:
    """An engine with its clients: of each request, the queue of instants of its tokens."""

    def __init__(self, number: int, hardware: Hardware) -> None:
        self._hardware = hardware
        self._engine = Engine(hardware, random.Random(number))
        self._held: dict[bytes, array[int]] = {}
        self._has_work = asyncio.Event()

    async def steps(self, _: web.Application) -> Any:
        task = asyncio.create_task(self._run())
        yield
        task.cancel()

    async def _run(self) -> None:
        engine, due = self._engine, 0.0
        while True:
            while not engine.has_work:
                self._has_work.clear()
                await self._has_work.wait()
            due = max(due, time.monotonic() - 0.002) + engine.take_step()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            engine.context += len(engine.running)
            for request in [*engine.running]:
                self._tell(request)
                if request.tokens >= request.arrival.output_tokens:
                    engine.running.remove(request)
                    engine.context -= request.size
            for request in engine.ending:
                self._tell(request)
                if request.arrival.output_tokens > 1:
                    engine.join(request)
                else:
                    engine.free(request)
            engine.ending = []

    def _tell(self, request: Request) -> None:
        request.tokens += 1
        request.note.put_nowait(None)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params, prompt = body.get("kv_transfer_params") or {}, body["prompt"]
        most = 1 if params.get("do_remote_decode") else body["max_tokens"]
        request = Request(Arrival(0.0, len(prompt), most), note=asyncio.Queue[None]())
        try:
            await self._take(request, prompt, bool(params.get("do_remote_prefill")))
            if not body.get("stream"):
                for _ in range(most):
                    await request.note.get()
                whole = {"index": 0, "text": " a" * most, "finish_reason": "length"}
                usage = {"prompt_tokens": len(prompt), "completion_tokens": most}
                content = {"choices": [whole], "usage": usage, "kv_transfer_params": HANDED_OVER}
                return web.json_response(content)
            out = web.StreamResponse()
            out.content_type = "text/event-stream"
            await out.prepare(http)
            for number in range(most):
                await request.note.get()
                await out.write(EVENT % (b'"length"' if number + 1 == most else b"null"))
            await out.write(b"data: [DONE]\n\n")
            return out
        finally:
            self._engine.withdraw(request, request.is_in and request.tokens == 0)

    async def _take(self, request: Request, prompt: list[int], is_read: bool) -> None:
        tokens, num = array("I", prompt), len(prompt)
        held = self._held.get(tokens[:BEGINNING].tobytes(), tokens[:0])
        request.done = min(common(tokens, held), num - 1)
        self._held[tokens[:BEGINNING].tobytes()] = tokens
        if is_read:
            await asyncio.sleep(self._hardware.handover)
            request.done, request.is_in = num, True
            self._engine.reserved += request.size
            self._tell(request)
            await asyncio.sleep(self._hardware.second_token)
            self._engine.joining.append(request)
        else:
            request.left = num - request.done
            self._engine.queue.append(request)
        self._has_work.set()

    async def metrics(self, _: web.Request) -> web.Response:
        engine = self._engine
        waiting = len(engine.queue) + len(engine.joining)
        counts = {"running": len(engine.running), "waiting": waiting}
        lines = [f"vllm:num_requests_{name} {num}\n" for name, num in counts.items()]
        return web.Response(text="".join([INFO, *lines]))


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "model", "max_model_len": 65536}]})


def app_of(number: int, hardware: Hardware = HARDWARE) -> web.Application:
    """An engine's endpoints; *number*: of its noise."""
    one, app = StandIn(number, hardware), web.Application(client_max_size=MOST_BYTES)
    app.cleanup_ctx.append(one.steps)
    app.router.add_post("/v1/completions", one.generate)
    app.router.add_get("/metrics", one.metrics)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", models)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--number", type=int, required=True, help="of its noise")
    args = parser.parse_args()
    web.run_app(app_of(args.number), host=LOOPBACK, port=args.port, print=None)


if __name__ == "__main__":
    main()
