"""Our reduce-RMS op in place of vLLM's fused op for MiniMax-M2's RMSNorm of Q and K.

The model calls vLLM's op through names of one module: they are patched once it has got our
workspace, and the shape of the compiled graph stays as it is."""

import functools
import importlib
import json
import logging
from typing import TYPE_CHECKING, Any

from vllm_commext.compat import hooks, tp_group
from vllm_commext.compat.monkey_patch import is_patched, original_of, patch
from vllm_commext.errors import CommextError, UnsupportedError
from vllm_commext.settings import read_settings

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from vllm_commext.reduce_rms.workspace import Workspace

logger = logging.getLogger("vllm.commext.reduce_rms")

MINIMAX = "vllm.model_executor.layers.minimax_rms_norm"
WORKSPACE = f"{MINIMAX}.lamport_workspace:get_allreduce_workspace"
FUSED_OP = f"{MINIMAX}.rms_norm_tp:_MINIMAX_FUSED_AR_RMS_QK"
FUSED_OP_BOUND = f"{MINIMAX}.rms_norm_tp:MINIMAX_QK_NORM_MAX_TOKEN_NUM"
MODEL = "MiniMax-M2"
MAX_TOKENS = 1 << 30  # vLLM's bound for its fused op; ours takes any number, in pieces
TOKENS_PER_LAUNCH = 16384
IDENTITY = "VLLM_COMMEXT_QK_NORM"  # among the names that vLLM's cache key is made of
_FASTER: dict[str, tuple[int, ...]] = {"NVIDIA H200": (2, 4)}
_DTYPES = ("bfloat16",)
_told: set[str] = set()
_served: dict[str, int] = {}
_workspaces: "list[tuple[Any, Workspace | CommextError]]" = []


def _tell_once(level: int, line: str) -> None:
    if line not in _told:
        _told.add(line)
        logger.log(level, line)


def identity() -> str:
    return json.dumps(_served, sort_keys=True) if _served else ""


def is_faster(gpu: str, world_size: int, dtype: str) -> bool:
    """True where the op was measured faster than vLLM's at every number of tokens, in CUDA graphs:
    ``benchmarks/reduce_rms.py``, results of 2026-11-22."""
    return dtype in _DTYPES and world_size in _FASTER.get(gpu, ())


def _make(rank: int, world_size: int, group: "ProcessGroup") -> "Workspace":
    import torch
    from vllm import envs

    from vllm_commext.reduce_rms import workspace
    from vllm_commext.reduce_rms.kernel import slot_bytes

    if not torch.cuda.is_available():
        return workspace.GroupWorkspace(group)
    made = workspace.LamportWorkspace(
        *(rank, world_size, slot_bytes(TOKENS_PER_LAUNCH, world_size), group),
        timeout_seconds=float(read_settings()["reduce_rms_timeout"]),
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )
    workspace.end_process_on_failure(made)
    return made


def workspace_of(rank: int, world_size: int, group: "ProcessGroup") -> "Workspace":
    """The workspace of a tensor-parallel group, one for all layers; collective at the first call.

    Raises:
        CommextError: it cannot be made on some rank; all ranks raise it, at each call.
    """
    found = next((made for known, made in _workspaces if known is group), None)
    if found is None:
        try:
            found = _make(rank, world_size, group)
        except CommextError as error:
            found = error
        _workspaces.append((group, found))
    if isinstance(found, CommextError):
        raise found
    return found


def _why_not(world_size: int, group: "ProcessGroup") -> str:
    """Reason why norms are left to vLLM, or empty. Collective at a group's first call."""
    import torch
    from vllm.config import get_current_vllm_config_or_none

    by_itself = read_settings()["reduce_rms"] == "auto"
    config = get_current_vllm_config_or_none()
    if by_itself and (reason := tp_group.why_not_by_itself(config, world_size)):
        return reason
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    facts = tp_group.agreed(group, device)
    if facts.microbatches:
        return "microbatches run on two streams, and a workspace serves one"
    if not by_itself:
        return ""
    if facts.eager:
        return "the engine is eager, and a call would cost the host more than the GPU gains"
    if not is_faster(facts.gpu, world_size, facts.dtype):
        where = f"{world_size} x {facts.gpu}, {facts.dtype}"
        return f"it was not measured faster than vLLM's fused op on {where}"
    return ""


def take_part(rank: int, world_size: int, group: "ProcessGroup") -> "Workspace | None":
    """The workspace for the model's norms; None, and a line why, where they are left to vLLM."""
    try:
        reason = _why_not(world_size, group)
        made = None if reason else workspace_of(rank, world_size, group)
    except CommextError as error:
        reason, made = str(error), None
    if made is not None:
        _served[MODEL] = made.handle
    elif rank == 0:
        level = logging.WARNING if read_settings()["reduce_rms"] == "1" else logging.INFO
        _tell_once(level, f"commext: reduce_rms leaves {MODEL} to vLLM: {reason}")
    return made


def get_allreduce_workspace(
    rank: int,
    world_size: int,
    comm_size: int | None = None,
    max_tokens: int = TOKENS_PER_LAUNCH,
    process_group: "ProcessGroup | None" = None,
) -> "torch.Tensor":
    """Replaces vLLM's function of that name; sizes are ours to choose."""
    made = None
    if process_group is not None:
        made = take_part(rank, world_size, process_group)
    if made is not None:
        _take_the_op()
        return made.workspace
    if original_of(FUSED_OP) is None:  # vLLM asks for a workspace only because the op is ours
        raise UnsupportedError("this vLLM has no fused op of its own")
    return original_of(WORKSPACE)(rank, world_size, comm_size, max_tokens, process_group)


def _take_the_op() -> None:
    """Put ours in place of vLLM's fused op, whose bound goes too; a second call changes nothing."""
    if not is_patched(FUSED_OP):
        patch({FUSED_OP_BOUND: MAX_TOKENS, FUSED_OP: fused_qk})


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
    """Replaces vLLM's fused op, inside an op that is opaque to the compiler."""
    from vllm_commext.reduce_rms import ops
    from vllm_commext.reduce_rms.workspace import find_tensor

    del rank, world_size
    if (q_weight.numel(), k_weight.numel()) != (q_size, kv_size):
        raise UnsupportedError(
            f"expected weights of {q_size} and {kv_size} elements, "
            f"got {q_weight.numel()} and {k_weight.numel()}"
        )
    # A line at start-up would not prove that it runs.
    _tell_once(logging.INFO, f"commext: reduce_rms ran for {MODEL}")
    handle = find_tensor(workspace).handle
    return ops.qk_rms_norm(qkv, q_weight, k_weight, handle, eps)


@functools.cache
def install() -> None:
    """Monkey-patch vLLM in this process; UnsupportedError where the op lacks what it needs."""
    _check_needs()
    importlib.import_module("vllm_commext.reduce_rms.ops")  # registers the op
    hooks.add_factor(IDENTITY, identity)
    patch({WORKSPACE: get_allreduce_workspace})
    if original_of(FUSED_OP) is None:
        _take_the_op()  # else vLLM would ask for no workspace


def _check_needs() -> None:
    from vllm.platforms import current_platform

    from vllm_commext.gpu import launch

    if current_platform.is_cuda():
        launch.nvrtc_version()
    elif not current_platform.is_cpu():
        raise UnsupportedError(f"expected an NVIDIA GPU, got {current_platform.device_name}")
