"""Connectors that wait for files: of one the worker stands still in the middle of a prompt, so that
what it has computed can be read and no more comes; the other begins to load when it may, so that
something can happen to the prefill engine between a request's first token and its blocks.

They are named in ``--kv-transfer-config``, with this module as ``kv_connector_module_path``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.kit import LOADS_BEGIN, STANDS
from vllm_commext.nixl.connector import CommextNixlConnector
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.requests import Load

NUM_STEPS = 8
POLL_SECONDS = 0.02


def has_stopped(file: Path) -> Path:
    """The file that is there once the worker stands still."""
    return file.with_suffix(".stopped")


class StandingNixlConnector(CommextNixlConnector):
    """Computes some steps after the file is there, and goes on when it is gone."""

    _num_steps = 0

    def wait_for_save(self) -> None:
        super().wait_for_save()
        file = Path(os.environ[STANDS])
        self._num_steps = self._num_steps + 1 if file.exists() else 0
        if self._num_steps < NUM_STEPS:
            return
        has_stopped(file).touch()
        while file.exists():
            time.sleep(POLL_SECONDS)


class LateNixlConnector(CommextNixlConnector):
    """Keeps loads back until the file is there; an engine that waits looks once a second."""

    _kept: tuple[Load, ...] = ()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        if isinstance(step, StepMetadata):
            loads = [*self._kept, *step.loads]
            may_begin = Path(os.environ[LOADS_BEGIN]).exists()
            self._kept = () if may_begin else tuple(one for one in loads if one.awaited)
            step.loads = [one for one in loads if one not in self._kept]
        super().start_load_kv(forward_context, **kwargs)
