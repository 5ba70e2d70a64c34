"""What known routers make of a client's request: the two requests, as their sources build them.

docs/routers.md names the sources. Each function sends the first request to the prefill server and
the second one to the decode server, and returns the latter's choices."""

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.kit.parity import PREFILL_PARAMS, tls

Body = Mapping[str, Any]
Router = Callable[[str, str, str, Body], list[Any]]


def post(url: str, path: str, body: Body, headers: Mapping[str, str]) -> httpx.Response:
    answer = httpx.post(
        f"{url}{path}",
        content=json.dumps(body, sort_keys=True),  # no router keeps the order of names
        headers={"Content-Type": "application/json", **headers},
        timeout=300.0,
        trust_env=False,
        verify=tls(),
    )
    assert answer.status_code == 200, answer.text
    return answer


def choices(answer: httpx.Response, body: Body) -> list[Any]:
    if not body.get("stream"):
        return answer.json()["choices"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in json.loads(event)["choices"]]


def text_of(found: list[Any]) -> str:
    pieces = [one.get("text") or one.get("message") or one.get("delta") or "" for one in found]
    return "".join(
        piece if isinstance(piece, str) else piece.get("content") or "" for piece in pieces
    )


def _two_steps(
    prefill: str, decode: str, path: str, body: Body, first: Body, headers: Mapping[str, str]
) -> list[Any]:
    asked = {**first, "stream": False, "kv_transfer_params": dict(PREFILL_PARAMS)}
    params = post(prefill, path, asked, headers).json()["kv_transfer_params"]
    return choices(post(decode, path, {**body, "kv_transfer_params": params}, headers), body)


def _without(body: Body, *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def vllm_router(prefill: str, decode: str, path: str, body: Body) -> list[Any]:
    """An id that names both servers; a chat's own limit is lowered where the client gave one."""
    servers = f"___prefill_addr_{urlsplit(prefill).netloc}___decode_addr_{urlsplit(decode).netloc}"
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    first = {**_without(body, "stream_options"), **dict.fromkeys(["max_tokens", *limits], 1)}
    request_id = f"{servers}_{uuid.uuid4().hex}"
    return _two_steps(prefill, decode, path, body, first, {"X-Request-Id": request_id})


def llm_d_sidecar(prefill: str, decode: str, path: str, body: Body) -> list[Any]:
    """Both limits are set, and the least number of tokens is left out."""
    first = _without(body, "stream_options", "min_tokens")
    first |= {"max_tokens": 1, "max_completion_tokens": 1}
    return _two_steps(prefill, decode, path, body, first, {"x-request-id": str(uuid.uuid4())})


def dynamo(prefill: str, decode: str, path: str, body: Body) -> list[Any]:
    """Exactly one token, and no id of its own."""
    first = {**_without(body, "stream_options"), "max_tokens": 1, "min_tokens": 1}
    return _two_steps(prefill, decode, path, body, first, {})


def production_stack(prefill: str, decode: str, path: str, body: Body) -> list[Any]:
    """It writes the prefill server's host, as in its own list of servers, over `remote_host`."""
    headers = {"X-Request-Id": str(uuid.uuid4())}
    limits = {"max_completion_tokens"} & body.keys() | {"max_tokens"}
    first = {**_without(body, "stream_options"), **dict.fromkeys(limits, 1), "stream": False}
    first["kv_transfer_params"] = dict(PREFILL_PARAMS)
    params = post(prefill, path, first, headers).json()["kv_transfer_params"]
    params["remote_host"] = prefill.split("://")[1].split(":")[0]
    return choices(post(decode, path, {**body, "kv_transfer_params": params}, headers), body)


ROUTERS: dict[str, Router] = {
    "vllm-router": vllm_router,
    "llm-d sidecar": llm_d_sidecar,
    "Dynamo": dynamo,
    "production-stack": production_stack,
}
