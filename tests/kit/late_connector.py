"""A connector that begins to load when a file says so, so that something can happen to the prefill
engine between a request's first token and its blocks.

Use it on the decode side, in ``--kv-transfer-config``:
``"kv_connector": "LateNixlConnector"``,
``"kv_connector_module_path": "tests.kit.late_connector"``, with the file in ``LOADS_BEGIN``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.kit import LOADS_BEGIN
from vllm_commext.nixl.connector import CommextNixlConnector
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.requests import Load


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
