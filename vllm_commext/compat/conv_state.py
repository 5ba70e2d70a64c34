"""The layout of state-space layers' convolution state, which vLLM takes from the environment.

A rank's slices are single runs of bytes where channels come first ("DS").  vLLM's default is the
other order ("SD"), and it chooses one by itself on some CPUs.  The connector asks for channels
first where it is in use and the user has not said otherwise; a server without it stays as it was.
"""

import importlib
import inspect
import os
from typing import Any

from vllm_commext.compat import evidence

ENVIRONMENT_NAME = "VLLM_SSM_CONV_STATE_LAYOUT"
DIM_FIRST = "DS"
PART = "nixl states"

_chosen_by_user: list[str | None] = []


def note_choice() -> None:
    """Remember what the user has chosen, before vLLM's platforms choose for themselves."""
    if not _chosen_by_user:
        _chosen_by_user.append(os.environ.get(ENVIRONMENT_NAME))


def ask_for_dim_first() -> None:
    """Ask for channels first, in this process and in those that it starts, unless the user has
    chosen; what vLLM may have remembered of the layout is dropped."""
    chosen = _chosen_by_user[0] if _chosen_by_user else os.environ.get(ENVIRONMENT_NAME)
    if chosen is not None or evidence.why_broken(PART) or not _kernels_take_it():
        return
    os.environ[ENVIRONMENT_NAME] = DIM_FIRST
    _mamba_utils().get_conv_state_layout.cache_clear()


def is_dim_first() -> bool:
    """Whether convolution states, where there are any, have channels first in this process."""
    return not evidence.why_broken(PART) and bool(_mamba_utils().is_conv_state_dim_first())


def _kernels_take_it() -> bool:
    """Not those for CPUs with bfloat16 instructions of a vLLM whose platform sets the other order
    whatever was chosen."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    choosing = inspect.getsource(type(current_platform).check_and_update_config)
    return f'os.environ["{ENVIRONMENT_NAME}"] = ' not in choosing


def _mamba_utils() -> Any:
    return importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
