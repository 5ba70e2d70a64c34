"""Ends a process whose workspace has failed: inside a CUDA graph nobody else would notice."""

import logging
import os
import threading
import time
import weakref

from vllm_commext.errors import CommextError
from vllm_commext.reduce_rms.handles import Workspace
from vllm_commext.reduce_rms.workspace import LamportWorkspace

logger = logging.getLogger("vllm.commext.reduce_rms")

INTERVAL_SECONDS = 1.0
EXIT_CODE = 70


def _watch(watched: "weakref.ref[LamportWorkspace]") -> None:
    while (workspace := watched()) is not None:
        try:
            workspace.raise_if_failed()
        except CommextError as error:
            logger.critical("commext: reduce_rms failed, this process ends: %s", error)
            logging.shutdown()
            os._exit(EXIT_CODE)
        del workspace
        time.sleep(INTERVAL_SECONDS)


def end_process_on_failure(workspace: Workspace) -> None:
    """Look at the workspace every second, for as long as it is there.

    A replayed graph runs none of our Python, and the rows of a failed workspace are NaN: an engine
    would go on to serve nonsense. A worker that ends is what engines know how to report.
    """
    if isinstance(workspace, LamportWorkspace):
        watched = weakref.ref(workspace)
        threading.Thread(
            target=_watch, args=(watched,), name="commext-reduce-rms-watch", daemon=True
        ).start()
