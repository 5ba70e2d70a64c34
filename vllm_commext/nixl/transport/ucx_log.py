"""UCX's own log, through a pipe: its warnings go to our logger, and which transports it chose is
remembered.

UCX tells its transports nowhere but in its log, at level "info", when it first reaches a peer.  It
keeps what it writes to a file back until a buffer is full, so it is asked to let go of it.
"""

import ctypes
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from vllm_commext.nixl.log import logger

_LEVEL, _FILE = "UCX_LOG_LEVEL", "UCX_LOG_FILE"
_LANES = re.compile(r"\b(?:intra-node|inter-node) cfg#\d+ (?P<lanes>.+)$")
_LANE = re.compile(r"([a-z0-9_]+)/")
_LEVELS = {"WARN": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.ERROR}
_LIBRARY = re.compile(r"/\S*/libucs[-.]\S*$", re.MULTILINE)
_SETTLE_SECONDS = 0.1
_MAX_LANES = 64


class UcxLog:
    """What UCX has said in this process.

    Where the user has set UCX's log level or file, UCX's log is left as it is and nothing is known
    of it.
    """

    def __init__(self) -> None:
        self._lanes: list[str] = []
        self._writing: int | None = None
        self._library: Any = None

    def attach(self) -> None:
        """Let UCX write here; call it before UCX is loaded, and ``detach`` after that."""
        if _LEVEL in os.environ or _FILE in os.environ or self._writing is not None:
            return
        reading, self._writing = os.pipe()
        os.environ[_LEVEL] = "info"
        os.environ[_FILE] = f"/proc/self/fd/{self._writing}"
        threading.Thread(
            target=self._follow, args=(reading,), name="commext-ucx-log", daemon=True
        ).start()

    def detach(self) -> None:
        """UCX has opened its log: leave nothing of that to other processes."""
        if self._writing is None or not os.environ.get(_FILE, "").startswith("/proc/self/fd/"):
            return
        del os.environ[_LEVEL], os.environ[_FILE]
        self._library = _loaded_library()
        if self._library is None:
            logger.warning("UCX's library is not where it was expected: its messages come late")

    def flush(self) -> None:
        """Let UCX write what it keeps back."""
        if self._library is not None:
            self._library.ucs_log_flush()

    def transports(self) -> tuple[str, ...]:
        """Transports that UCX has set up since the last call, for instance ("tcp", "cuda_ipc")."""
        self.flush()
        time.sleep(_SETTLE_SECONDS if self._library is not None else 0)
        lanes, self._lanes = self._lanes, []
        return parse_transports(" ".join(lanes))

    def _follow(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                self._take(line.rstrip())

    def _take(self, line: str) -> None:
        found = _LANES.search(line)
        if found:
            self._lanes = [*self._lanes[1 - _MAX_LANES :], found["lanes"]]
            return
        for word, level in _LEVELS.items():
            if f" {word} " in line:
                logger.log(level, "UCX: %s", line)


def _loaded_library() -> Any:
    """UCX's base library as this process has loaded it, None where there is none."""
    try:
        found = _LIBRARY.search(Path("/proc/self/maps").read_text())
        return ctypes.CDLL(found[0]) if found else None
    except OSError:
        return None


def parse_transports(lanes: str) -> tuple[str, ...]:
    """Names of transports in a line of UCX such as ``rma(rc_mlx5/mlx5_0:1) am(tcp/lo)``."""
    return tuple(dict.fromkeys(_LANE.findall(lanes)))
