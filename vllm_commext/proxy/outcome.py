"""What became of one request: for the counts, the access log and the answer's headers."""

import time
from dataclasses import dataclass, field

from vllm_commext.proxy.failures import SIDE_PROXY

TWO_STEP = "two-step"
STREAMED = "streamed"
LOCAL_PREFILL = "local-prefill"
DIRECT = "direct"


@dataclass
class Outcome:
    """Filled in while the request is served. kind, side: labels of the count. path: how it went,
    one of `TWO_STEP`, `STREAMED` (both steps at once), `LOCAL_PREFILL` and `DIRECT`.
    first_token_seconds: None before it came. is_answered: the client has its whole stream, whatever
    comes after."""

    request_id: str
    kind: str = "ok"
    side: str = SIDE_PROXY
    path: str = ""
    prefill: str = ""
    decode: str = ""
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
        """What the client is told of the engines that answered."""
        told = {"X-Request-Id": self.request_id, "X-Commext-Path": self.path}
        told |= {"X-Commext-Decode": self.decode}
        has_prefill = self.path in (TWO_STEP, STREAMED)
        return told | ({"X-Commext-Prefill": self.prefill} if has_prefill else {})
