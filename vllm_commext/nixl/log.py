"""The connector's logger, and log lines that cannot flood the log."""

import logging
from collections.abc import MutableMapping
from typing import Any

from vllm_commext import limited_log

PREFIX = "commext nixl: "


class _Prefixed(logging.LoggerAdapter[logging.Logger]):
    """Begins each line with the connector's name: vLLM's format shows only file and line."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{PREFIX}{msg}", kwargs


logger = _Prefixed(logging.getLogger("vllm.commext.nixl"), {})


class RateLimitedLog(limited_log.RateLimitedLog):
    """That of the connector."""

    def __init__(self, burst: int = 5, period_seconds: float = 10.0) -> None:
        super().__init__(logger.logger, PREFIX, burst, period_seconds)
