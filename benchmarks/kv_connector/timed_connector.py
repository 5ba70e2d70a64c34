"""Our connector, which also writes down when its scheduler side hears of the end of a hold.

Used by ``benchmarks/nixl_idle.py --releases``; the file's path comes from the environment.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from vllm_commext.nixl import connector

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

RECORD = "NIXL_IDLE_RECORD"


class TimedNixlConnector(connector.CommextNixlConnector):
    """Appends ``seconds request_id`` to the record, by the host's monotonic clock."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn what ended, and note when."""
        now = time.monotonic()
        super().update_connector_output(connector_output)
        with open(os.environ[RECORD], "a", encoding="utf-8") as record:
            for request_id in connector_output.finished_sending or ():
                record.write(f"{now} {request_id}\n")
