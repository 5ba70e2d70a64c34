"""Every error of the proxy's own as a JSON object that names the side at fault."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from vllm_commext.proxy.connections import begin, complaints, cut
from vllm_commext.proxy.failures import ClientGoneError, ProxyError

logger = logging.getLogger("vllm.commext.proxy")

SIDE = "X-Commext-Side"


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn what a handler raises into an answer. Nobody's body is unfolded: what it would be is
    the sender's choice, and no engine takes such a body."""
    begin(request)
    try:
        _check_encoding(request)
        return await handler(request)
    except ProxyError as error:
        return _error_response(error)
    except web.HTTPException as error:
        message = f"{error.reason}: {request.method} {request.path} is none of this proxy's routes"
        return _error_response(ProxyError(error.status, "bad_request", message))
    except ClientGoneError as gone:
        logger.info("%s", gone)
        return web.Response(status=499)  # nobody reads it
    except Exception as error:
        complaints.exception("internal", "unexpected error in the proxy")
        if request.writer.output_size > 0:  # a second answer would be read as more of the first
            cut(request)
            raise ConnectionError("the answer had begun") from error
        return _error_response(ProxyError(500, "internal", "unexpected error; see the log"))


def _check_encoding(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"expected a body without Content-Encoding, got {encoding[:40]!r}"
        raise ProxyError(415, "bad_request", message)


def _error_response(error: ProxyError) -> web.Response:
    headers = {SIDE: error.side}
    if error.status == 503:
        headers["Retry-After"] = "1"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.answer is None:
        return web.json_response(error.as_json(), status=error.status, headers=headers)
    headers["Content-Type"] = error.answer.content_type
    return web.Response(status=error.status, body=error.answer.body, headers=headers)
