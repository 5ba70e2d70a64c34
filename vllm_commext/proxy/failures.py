"""What can go wrong with a request, as one exception that knows the answer to give."""

from dataclasses import dataclass
from typing import Any

from vllm_commext.errors import CommextError

SIDE_PROXY = "proxy"


@dataclass(frozen=True)
class EngineAnswer:
    """An engine's own error answer, to be passed on as it is."""

    body: bytes
    content_type: str


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


class ClientGoneError(CommextError):
    """The client closed its connection or takes no more bytes: nobody is left to answer."""
