"""An engine that is to go: a file tells all of its processes to take no new work and to finish what
there is.

The file is the one that ``COMMEXT_DRAIN_FILE`` names; while it is there, the engine drains.  It
counts only in a folder that only the engine's user, or root, can write.  The gate in front of
the HTTP server refuses new work, the connector tells the decode engines that read from it.
``vllm-commext drain`` makes the file and waits; Kubernetes calls that before it stops a container.
"""

import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from vllm_commext import private_files
from vllm_commext.errors import ConfigError

VARIABLE = "COMMEXT_DRAIN_FILE"
"""Not called ``VLLM_...``: vLLM hands such variables on to other hosts, which have other files."""
HEADER = "X-Commext-Draining"
"""In an answer that refuses work for this reason alone: nothing of it was begun."""
RELEASE = "x-commext-release"
"""In a request that frees prefills: no work, it ends some."""
LOOK_SECONDS = 0.1
MIDDLEWARE = "vllm_commext.drain.Gate"
"""What vLLM's option ``--middleware`` takes."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class DrainFile:
    """The file, at `path` while the engine drains; looked for at most every ``LOOK_SECONDS``."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._is_there = False
        self._next_look = 0.0

    def is_there(self) -> bool:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._is_there = private_files.is_there(self.path)
        return self._is_there


def drain_file(environ: Mapping[str, str] = os.environ) -> DrainFile | None:
    path = environ.get(VARIABLE, "")
    return DrainFile(path) if path else None


class Gate:
    """ASGI middleware in front of an engine's HTTP server.

    While the engine drains, it answers ``/health`` and every POST without ``RELEASE`` with 503 and
    ``HEADER``, and accepts no WebSocket; what is under way goes on, and so does what only reads.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        found = drain_file()
        if found is None:
            raise ConfigError(
                f"--middleware {MIDDLEWARE}: expected {VARIABLE} to name the file that is there "
                "while this engine drains, got none; set it, or start without that middleware"
            )
        self._app = app
        self._file = found
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "websocket" or scope.get("method") == "POST"
        is_work = is_work and RELEASE.encode() not in dict(scope.get("headers", ()))
        is_health = scope.get("path") == "/health"
        if (is_work or is_health) and self._file.is_there():
            await self._refuse(scope, receive, send)
            return
        self._num_in_flight += is_work
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_in_flight -= is_work

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})
            return
        # A client that still sends would otherwise find its connection cut, and no answer.
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        told = "this engine drains and takes no new work: ask another one"
        body = {
            "error": {"message": told, "type": "draining", "param": None, "code": 503},
            "in_flight": self._num_in_flight,
        }
        headers = [(b"content-type", b"application/json"), (HEADER.lower().encode(), b"1")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})
