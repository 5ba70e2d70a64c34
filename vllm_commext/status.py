"""What is active in this process, what is not, and why.

Each capability gets one `CapabilityStatus` when the plugin registers; ``vllm-commext doctor``
prints the same objects that the log lines were made from.
"""

import functools
import logging
import multiprocessing
import os
import sys
from dataclasses import dataclass
from enum import StrEnum

logger = logging.getLogger("vllm.commext.status")


class State(StrEnum):
    """ACTIVE: ours is in place. OFF: the user said so, or left it to us and it is not proven here.
    REFUSED: it was wanted and cannot run."""

    ACTIVE = "active"
    OFF = "off"
    REFUSED = "refused"


@dataclass(frozen=True)
class CapabilityStatus:
    name: str
    state: State
    reason: str = ""  # why it is off or refused, or a remark on an active one
    fallback: str = ""  # takes its place where it is refused
    required: bool = False  # asked for by name: a refusal is an error and not only a warning
    is_untested: bool = False  # off for nothing but vLLM's version
    is_quiet: bool = False  # off by default, which is no news

    def line(self) -> str:
        remark = "; ".join(part for part in (self.reason, self.fallback) if part)
        return f"commext: {self.name} {self.state.value}" + (f" ({remark})" if remark else "")

    def level(self) -> int:
        if self.state is not State.REFUSED:
            return logging.DEBUG if self.is_quiet else logging.INFO
        return logging.ERROR if self.required else logging.WARNING


_statuses: dict[str, CapabilityStatus] = {}


def tell(level: int, line: str) -> None:
    """Log the line, or write it to standard error while nothing would log it.

    vLLM loads plugins before it configures its logging, so what is logged then is lost; and where
    it forks its other processes, no later line would make up for it.
    """
    if logger.hasHandlers() or os.environ.get("VLLM_CONFIGURE_LOGGING", "1") == "0":
        logger.log(level, line)
        return
    wanted = logging.getLevelName(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    if not isinstance(wanted, int) or level >= wanted:
        sys.stderr.write(f"{logging.getLevelName(level)} {line}\n")


TOLD = "COMMEXT_TOLD"
"""Lines that the process which started this one has logged, for those of the same server."""


@functools.cache
def _told_before() -> frozenset[str]:
    is_part = multiprocessing.parent_process() is not None
    return frozenset(os.environ.get(TOLD, "").split("\n") if is_part else ())


def record(status: CapabilityStatus) -> None:
    """Keep the outcome for this process, in place of an earlier one, and log its line: at DEBUG
    where the process that started this one as a part of its server has told it."""
    line = status.line()
    if _statuses.get(status.name) != status:
        tell(logging.DEBUG if line in _told_before() else status.level(), line)
    _statuses[status.name] = status
    os.environ[TOLD] = "\n".join(one.line() for one in _statuses.values())


def recorded() -> tuple[CapabilityStatus, ...]:
    return tuple(_statuses.values())


def find(name: str) -> CapabilityStatus | None:
    return _statuses.get(name)


def clear() -> None:
    """Forget all outcomes, so that a test can register afresh."""
    _statuses.clear()
    os.environ.pop(TOLD, None)
