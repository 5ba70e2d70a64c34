"""The baseline: a two-step proxy of FastAPI and httpx, in the manner of vLLM's toy proxy.

`python toy.py PORT PREFILL_URL DECODE_URL`. Written for this benchmark: one client an engine
with its connections kept, the body parsed and sent twice, the decode's bytes passed on as they
come; no retries, no health checks, no time-outs, no metrics.
"""

import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    prefill = httpx.AsyncClient(base_url=prefill_url, timeout=None, limits=limits)
    decode = httpx.AsyncClient(base_url=decode_url, timeout=None, limits=limits)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        step = {**body, "max_tokens": 1, "stream": False}
        step["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = await prefill.post("/v1/completions", json=step, headers=headers)
        answer.raise_for_status()
        body["kv_transfer_params"] = answer.json().get("kv_transfer_params") or {}

        async def relay() -> AsyncIterator[bytes]:
            async with decode.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                response.raise_for_status()
                async for piece in response.aiter_bytes():
                    yield piece

        if body.get("stream"):
            return StreamingResponse(relay(), media_type="text/event-stream")
        whole = await decode.post("/v1/completions", json=body, headers=headers)
        return JSONResponse(whole.json(), status_code=whole.status_code)

    return app


if __name__ == "__main__":
    uvicorn.run(
        make_app(sys.argv[2], sys.argv[3]),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
    )
