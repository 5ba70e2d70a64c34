"""A connector whose worker stands still in the middle of a prompt while a file is there: what it
has computed can be read, and no more comes.

It is named in ``--kv-transfer-config``, with this module as ``kv_connector_module_path``."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.kit import STANDS
from vllm_commext.nixl.connector import CommextNixlConnector

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
