"""Our reduce-RMS op in place of what vLLM does for a tensor-parallel QK RMSNorm.

MiniMax-M2 calls a fused op of vLLM's through names of one module: they are patched, and the shape
of the compiled graph stays as it is. OLMoE gathers whole Q and K, normalises them and throws most
of it away: its attention is given our op instead, when the model is loaded.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from vllm_commext.compat.microbatches import microbatches
from vllm_commext.compat.monkey_patch import is_patched, patch_all, row_of
from vllm_commext.errors import UnsupportedError
from vllm_commext.settings import read_settings

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from vllm_commext.reduce_rms.handles import Workspace

logger = logging.getLogger("vllm.commext.reduce_rms")

MINIMAX = "vllm.model_executor.layers.minimax_rms_norm"
OLMOE = "vllm.model_executor.models.olmoe"
OLMOE_OURS = "vllm_commext.compat.reduce_rms_olmoe:OlmoeForCausalLM"
MAX_TOKENS = 1 << 30  # vLLM's bound for its fused op; ours takes any number, in pieces
TOKENS_PER_LAUNCH = 16384
_told: set[str] = set()
_workspaces: "list[tuple[Any, Workspace]]" = []


def tell_once(what: str) -> None:
    """Log at the first call that ours has run, for a line at start-up does not prove it."""
    if what not in _told:
        _told.add(what)
        logger.info("commext: reduce_rms ran for %s", what)


def _refuse_two_streams() -> None:
    from vllm.config import get_current_vllm_config_or_none

    if microbatches(get_current_vllm_config_or_none()):
        raise UnsupportedError(
            "microbatches run on two streams, and a workspace serves one; turn one of them off"
        )


def _make(rank: int, world_size: int, group: "ProcessGroup") -> "Workspace":
    import torch
    from vllm import envs

    from vllm_commext.reduce_rms import handles, watch, workspace

    if not torch.cuda.is_available():
        return handles.GroupWorkspace(group)
    _refuse_two_streams()
    words = workspace.get_allreduce_workspace(
        rank,
        world_size,
        max_tokens=TOKENS_PER_LAUNCH,
        process_group=group,
        timeout_seconds=float(read_settings()["reduce_rms_timeout"]),
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )
    made = handles.find_tensor(words)
    watch.end_process_on_failure(made)
    return made


def workspace_of(rank: int, world_size: int, group: "ProcessGroup") -> "Workspace":
    """The workspace of a tensor-parallel group, one for all layers.

    Raises:
        UnsupportedError: there is no peer access, or the calls would come from two streams.
    """
    for known, made in _workspaces:
        if known is group:
            return made
    made = _make(rank, world_size, group)
    _workspaces.append((group, made))
    return made


def get_allreduce_workspace(
    rank: int,
    world_size: int,
    comm_size: int | None = None,
    max_tokens: int = TOKENS_PER_LAUNCH,
    process_group: "ProcessGroup | None" = None,
) -> "torch.Tensor":
    """What vLLM's function of that name is replaced by; sizes are ours to choose."""
    del comm_size, max_tokens
    if process_group is None:
        raise UnsupportedError("expected the tensor-parallel group, got none")
    try:
        return workspace_of(rank, world_size, process_group).workspace
    except UnsupportedError as error:
        # vLLM catches it and speaks of GPUs without peer access, whatever the reason.
        logger.warning("commext: reduce_rms cannot run, vLLM's fall-back does: %s", error)
        raise


def fused_qk(
    qkv: "torch.Tensor",
    q_weight: "torch.Tensor",
    k_weight: "torch.Tensor",
    workspace: "torch.Tensor",
    q_size: int,
    kv_size: int,
    rank: int,
    world_size: int,
    eps: float,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """What vLLM's fused op is replaced by; it stands inside an op that is opaque to the compiler.

    Raises:
        UnsupportedError: the weights are not those of the row's Q and K.
    """
    from vllm_commext.reduce_rms import ops
    from vllm_commext.reduce_rms.handles import find_tensor

    del rank, world_size
    if (q_weight.numel(), k_weight.numel()) != (q_size, kv_size):
        raise UnsupportedError(
            f"expected weights of {q_size} and {kv_size} elements, "
            f"got {q_weight.numel()} and {k_weight.numel()}"
        )
    tell_once("MiniMax-M2")
    handle = find_tensor(workspace).handle
    return ops.qk_rms_norm(qkv, q_weight, k_weight, handle, eps)


def install() -> None:
    """Monkey-patch vLLM in this process; a second call changes nothing.

    Raises:
        UnsupportedError: what the op needs is not there.
    """
    from vllm.model_executor.models import ModelRegistry

    norm = f"{MINIMAX}.rms_norm_tp"
    if is_patched(row_of(f"{norm}:_MINIMAX_FUSED_AR_RMS_QK")):
        return
    _check_needs()
    importlib.import_module("vllm_commext.reduce_rms.ops")  # registers the ops
    patch_all(
        {
            f"{MINIMAX}.lamport_workspace:get_allreduce_workspace": get_allreduce_workspace,
            f"{norm}:MINIMAX_QK_NORM_MAX_TOKEN_NUM": MAX_TOKENS,
            f"{norm}:_MINIMAX_FUSED_AR_RMS_QK": fused_qk,
        }
    )
    ModelRegistry.register_model("OlmoeForCausalLM", OLMOE_OURS)


def _check_needs() -> None:
    """On a GPU platform, what compiles the kernel; without touching the GPU."""
    from vllm.platforms import current_platform

    from vllm_commext.gpu import nvrtc

    if current_platform.is_cuda():
        nvrtc.nvrtc_version()
    elif not current_platform.is_cpu():
        raise UnsupportedError(f"expected an NVIDIA GPU, got {current_platform.device_name}")
