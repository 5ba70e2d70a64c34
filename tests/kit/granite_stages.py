"""Granite's hybrid model for servers with pipeline stages.

vLLM 0.32 has it compute in stages, but each stage then fails as it loads the weights of the others'
layers (``KeyError: 'layers.3.input_layernorm.weight'``). Here a stage loads its own. vLLM finds
this as it finds any model from outside: by a plug-in, which `environ` brings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from vllm.model_executor.models.utils import is_pp_missing_parameter

from tests.kit import ROOT

if TYPE_CHECKING:
    import torch

NAME = "GraniteMoeHybridForCausalLM"


class StagedGranite(GraniteMoeHybridForCausalLM):
    """Each stage loads the weights of its own layers."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's, which is given all weights."""
        own = (pair for pair in weights if not is_pp_missing_parameter(pair[0], self))
        return super().load_weights(own)


def register() -> None:
    """The plug-in."""
    ModelRegistry.register_model(NAME, f"{__name__}:{StagedGranite.__name__}")


def environ(folder: Path) -> Mapping[str, str]:
    """What a server needs to find the plug-in, which is written into *folder*."""
    info = folder / "granite_stages-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: granite-stages\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\ngranite_stages = {__name__}:{register.__name__}\n"
    )
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
