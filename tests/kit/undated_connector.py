"""A connector that, where a file says so, goes on using what was computed before new weights: with
it a test shows that it would notice.  Prompts whose loads it keeps back are kept where they are, as
those of requests that wait for room.

Use it on the decode side, in ``--kv-transfer-config``: ``"kv_connector": "UndatedNixlConnector"``,
``"kv_connector_module_path": "tests.kit.undated_connector"``, with the file in
``FORGETS_NOTHING``, and one in ``LOADS_BEGIN``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.kit import FORGETS_NOTHING, LOADS_BEGIN, late_connector
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.requests import Wait


class UndatedNixlConnector(late_connector.LateNixlConnector):
    """Forgets nothing while the file is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        side = self._scheduler_side
        if side is None:
            return
        forget = side.forget_computed

        def forget_computed() -> None:
            if not Path(os.environ[FORGETS_NOTHING]).exists():
                forget()

        side.forget_computed = forget_computed

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        if isinstance(step, StepMetadata) and not Path(os.environ[LOADS_BEGIN]).exists():
            step.waits += [
                Wait(one.request_id, one.remote) for one in step.loads if one.awaited and one.remote
            ]
        super().start_load_kv(forward_context, **kwargs)
