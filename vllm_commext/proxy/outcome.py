"""What becomes of a request, and what can go wrong with it: one exception that knows the answer."""

import errno
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_commext.errors import CommextError

SIDE_PROXY = "proxy"
ENGINES_LOST = "engines_lost"
# What this host or process lacks, and no engine can help.
_LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))
TWO_STEP = "two-step"
STREAMED = "streamed"
LOCAL_PREFILL = "local-prefill"
DIRECT = "direct"
MAX_LOST = 2
"""Engines that one request may lose in one step: it may be what ends them, so it is tried at no
further one. One of each step may have been lost with their host."""
MIN_APART = 8
"""Tokens between the places of an answer where two engines were lost that one request has not
ended: it does the same at each, whether that goes on with the answer or begins it anew."""


@dataclass
class Losses:
    """The engines that one request has lost: their connections have broken, or they have died.

    engines: of each its step and its name. place: tokens that the last had told of the answer.
    """

    engines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    place: int = 0

    def break_off(self, place: int) -> None:
        """An engine has told so many tokens of the answer: forget those lost at another place."""
        if place and abs(place - self.place) >= MIN_APART:
            self.engines.clear()
        self.place = place

    def note(self, error: "ProxyError") -> "ProxyError":
        """Note *error* of an engine that is lost; returns what it means for the request."""
        self.engines.append((error.side, error.engine or ""))
        if sum(side == error.side for side, _ in self.engines) < MAX_LOST:
            return error
        names = " and ".join(dict.fromkeys(name for _, name in self.engines))
        message = (
            f"{names} lost with this request, {len(self.engines)} times: it may be what ends "
            f"engines, and is tried at no other one. The last time: {error}"
        )
        return ProxyError(502, ENGINES_LOST, message, side=error.side, engine=error.engine)


@dataclass(frozen=True)
class EngineAnswer:
    """An engine's own answer, to be passed on as it is: ``headers`` are its type and what it lets
    the pages of browsers do."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


class ProxyError(CommextError):
    """A request ends here: HTTP *status*, a short *kind*, and the *side* at fault.

    kind: one of a fixed set of words (it is a metric label). side: ``proxy``, ``prefill`` or
    ``decode``. can_retry: another engine may be asked the same, since this one has done nothing
    that a second attempt would repeat to the client's harm. can_restart: the request may be
    served anew from its first step, since the engine has failed it and not refused it, and the
    client has seen nothing.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        side: str = SIDE_PROXY,
        engine: str | None = None,
        can_retry: bool = False,
        can_restart: bool = False,
        answer: EngineAnswer | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.side = side
        self.engine = engine
        self.can_retry = can_retry
        self.can_restart = can_restart
        self.answer = answer

    def in_a_stream(self) -> dict[str, Any]:
        """Error object for an event of a stream that has begun: the engine's own, if it is one."""
        try:
            told = json.loads(self.answer.body) if self.answer else None
        except (ValueError, RecursionError):
            told = None
        return told if isinstance(told, dict) and "error" in told else self.as_json()

    def as_json(self) -> dict[str, Any]:
        """The OpenAI error object, with the side and the engine added."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": None,
                "code": self.status,
                "side": self.side,
                "engine": self.engine,
            }
        }


def bad_request(message: str) -> ProxyError:
    """Refusal of a client's request."""
    return ProxyError(400, "bad_request", message)


class ClientGoneError(CommextError):
    """The client closed its connection or takes no more bytes: nobody is left to answer."""


@dataclass
class Outcome:
    """Filled in while the request is served. kind, side: labels of the count. path: how it went,
    one of `TWO_STEP`, `STREAMED` (both steps at once), `LOCAL_PREFILL` and `DIRECT`.
    placement: for the client, where it was planned. first_token_seconds: None before it came.
    is_answered: the client has its whole stream, whatever comes after."""

    request_id: str
    kind: str = "ok"
    side: str = SIDE_PROXY
    path: str = ""
    prefill: str = ""
    decode: str = ""
    placement: str = ""
    status: int = 0
    began: float = field(default_factory=time.monotonic)
    first_token_seconds: float | None = None
    is_answered: bool = False

    def set(self, kind: str, side: str) -> None:
        self.kind, self.side = kind, side

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def headers(self) -> dict[str, str]:
        """Headers that tell the client which engines answered."""
        told = {"X-Request-Id": self.request_id, "X-Commext-Path": self.path}
        told |= {"X-Commext-Decode": self.decode}
        has_prefill = self.path in (TWO_STEP, STREAMED)
        if self.placement:
            told["X-Commext-Placement"] = self.placement
        return told | ({"X-Commext-Prefill": self.prefill} if has_prefill else {})


def lack(error: BaseException | None) -> str:
    """Resource that this host lacks, if that is why *error* came; "" if not."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LACKS:
            return error.strerror or errno.errorcode[error.errno]
        error = error.__cause__ or error.__context__
    return ""
