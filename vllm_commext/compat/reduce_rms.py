"""Our reduce-RMS op in place of what vLLM does for an RMSNorm of tensor-parallel rows.

MiniMax-M2 calls a fused op of vLLM's through names of one module: they are patched once a model has
got our workspace, and the shape of the compiled graph stays as it is. Where the norm of Q and of K
of another model runs over all heads, vLLM gathers whole Q and K on every rank, normalises them and
throws away all but a part; the op exchanges two numbers a token instead. Such a model is given the
op when vLLM imports it. A layer's `commext_handle` is that of its workspace, and 0 where vLLM's own
way is taken.
"""

import functools
import importlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_commext.collective import Collective
from vllm_commext.compat import fits, hooks, tp_group
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
# What vLLM does without the op.
FUSED = "vLLM's fused op"  # MiniMax-M2: Q and K in one launch of vLLM's own
GATHERED = "gathered Q and K"  # whole rows on every rank, normalised and thrown away but for a part
KINDS = (FUSED, GATHERED)

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
_FASTER: dict[tuple[str, str], tuple[int, ...]] = {(FUSED, H200): (2, 4), (GATHERED, H100): (2,)}
_DTYPES = ("bfloat16",)

QK_NORMS = ("q_norm", "k_norm")
FUSERS = "vllm.model_executor.models.transformers.fusers.rms_norm"
OLMOE = "vllm.model_executor.models.olmoe:OlmoeAttention"
Norm = Callable[..., Any]
ATTENTION, TRANSFORMERS = "OLMoE", "the Transformers backend"
_failures: dict[str, str] = {}
"""By model, what its first layer's trial found; empty where that was all well."""
_told: set[str] = set()
_served: dict[str, int] = {}
_workspaces: "list[tuple[Any, Workspace | CommextError]]" = []


def tell_once(what: str) -> None:
    """Log at the first call that ours has run, for a line at start-up does not prove it."""
    if what not in _told:
        _told.add(what)
        logger.info("commext: reduce_rms ran for %s", what)


def identity() -> str:
    return json.dumps(_served, sort_keys=True) if _served else ""


def is_faster(kind: str, gpu: str, world_size: int, dtype: str) -> bool:
    """True where the op was measured faster than `kind`, one of `KINDS`, at every number of
    tokens, in CUDA graphs: ``benchmarks/reduce_rms.py``, results of 2026-11-22, and
    ``benchmarks/spread_norms.py``, of 2026-11-24."""
    return dtype in _DTYPES and world_size in _FASTER.get((kind, gpu), ())


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


def _why_not(kind: str, world_size: int, group: "ProcessGroup") -> str:
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
    if not is_faster(kind, facts.gpu, world_size, facts.dtype):
        where = f"{world_size} x {facts.gpu}, {facts.dtype}"
        return f"it was not measured faster than {kind} on {where}"
    return ""


def take_part(
    model: str, kind: str, rank: int, world_size: int, group: "ProcessGroup"
) -> "Workspace | None":
    """The workspace for a model's norms, or None where they are left to vLLM, with one line why.
    *kind*: vLLM's way without the op, one of `KINDS`."""
    try:
        reason = _why_not(kind, world_size, group)
        made = None if reason else workspace_of(rank, world_size, group)
    except CommextError as error:
        reason, made = str(error), None
    if made is None:
        _tell_why(model, reason, rank)
        return None
    _served[model] = made.handle
    return made


def _tell_why(model: str, reason: str, rank: int) -> None:
    line = f"commext: reduce_rms leaves {model} to vLLM: {reason}"
    if line in _told or rank:
        return
    _told.add(line)
    asked = read_settings()["reduce_rms"] == "1"
    logger.log(logging.WARNING if asked else logging.INFO, line)


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
        made = take_part(MODEL, FUSED, rank, world_size, process_group)
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
    tell_once(MODEL)
    handle = find_tensor(workspace).handle
    return ops.qk_rms_norm(qkv, q_weight, k_weight, handle, eps)


def _serve(
    model: str, kind: str, layer: Any, norms: tuple[Norm, Norm], widths: Sequence[int]
) -> None:
    """Let a layer use the op where its group has a workspace and the op gives what vLLM's norm
    does; collective. *norms*: vLLM's and ours, which take rows of these widths; *kind*: see
    `take_part`."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    made = take_part(model, kind, group.rank_in_group, group.world_size, group.cpu_group)
    layer.commext_handle = made.handle if made is not None else 0
    if made is None:
        return
    if fits.must_test_itself(f"norm of {model}") and model not in _failures:
        _failures[model] = _try_out(layer, norms, widths, Collective.over(group.cpu_group))
        if _failures[model] and group.rank_in_group == 0:
            logger.warning("commext: reduce_rms leaves %s to vLLM: %s", model, _failures[model])
    if _failures.get(model):
        layer.commext_handle = 0
    else:
        tell_once(model)


def _try_out(layer: Any, norms: tuple[Norm, Norm], widths: Sequence[int], ranks: Collective) -> str:
    """Compare both norms on random rows and weights; returns what differs. Collective."""
    import torch

    parts = [getattr(layer, name) for name in QK_NORMS if hasattr(layer, name)] or [layer]
    weights = [part.weight.data for part in parts]

    def compare() -> None:
        rows = [torch.randn(5, width).to(weights[0]) for width in widths]
        for part, kept in zip(parts, weights, strict=True):
            part.weight.data = torch.rand_like(kept)
        try:
            wanted, found = (norm(layer, *rows) for norm in norms)
        finally:
            for part, kept in zip(parts, weights, strict=True):
                part.weight.data = kept
        pairs = [(wanted, found)] if torch.is_tensor(wanted) else zip(wanted, found, strict=True)
        if not all(torch.allclose(one, other, 1e-2, 1e-2) for one, other in pairs):
            raise UnsupportedError("it differs from vLLM's own on random rows")

    try:
        ranks.agree(compare)
    except UnsupportedError as error:
        return str(error)
    return ""


def _shard(weight: "torch.Tensor", rank: int, size: int) -> "torch.Tensor":
    return weight[rank * size : (rank + 1) * size]


def _spreads_whole_rows(attention: Any) -> bool:
    """Check that a rank's Q and K are parts of rows that are normed as a whole, and no copies."""
    norms = [getattr(attention, name, None) for name in QK_NORMS]
    if attention.tp_size == 1:
        return False
    wanted = [size * attention.tp_size for size in (attention.q_size, attention.kv_size)]
    return [norm.weight.numel() for norm in norms if norm is not None] == wanted


def _install_attention() -> None:
    stock_init = original_of(f"{OLMOE}.__init__")
    stock_norm = original_of(f"{OLMOE}._apply_qk_norm")

    @functools.wraps(stock_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - vLLM's name
        stock_init(self, *args, **kwargs)
        self.commext_handle = 0
        if _spreads_whole_rows(self):
            norms, widths = (stock_norm, _apply_qk_norm), (self.q_size, self.kv_size)
            _serve(ATTENTION, GATHERED, self, norms, widths)

    @functools.wraps(stock_norm)
    def _apply_qk_norm(self: Any, q: "torch.Tensor", k: "torch.Tensor") -> Any:
        import torch

        if not self.commext_handle:
            return stock_norm(self, q, k)
        return torch.ops.vllm_commext.split_qk_rms_norm(
            q,
            k,
            _shard(self.q_norm.weight, self.tp_rank, self.q_size),
            _shard(self.k_norm.weight, self.tp_rank, self.kv_size),
            self.commext_handle,
            self.q_norm.variance_epsilon,
        )

    patch({f"{OLMOE}.__init__": __init__, f"{OLMOE}._apply_qk_norm": _apply_qk_norm})


def _install_transformers() -> None:
    stock_fuse = original_of(f"{FUSERS}:RMSNormFuser.fuse")
    stock_forward = original_of(f"{FUSERS}:TPAwareNormMixin.forward")

    @functools.wraps(stock_fuse)
    def fuse(self: Any, module: Any, prefix: str, vllm_config: Any) -> Any:
        made = stock_fuse(self, module, prefix, vllm_config)
        width = vllm_config.model_config.get_head_size()
        if _is_spread(made, prefix, width):
            norms, widths = (stock_forward, forward), (made.weight.shape[0] // made.tp_size,)
            _serve(TRANSFORMERS, GATHERED, made, norms, widths)
        return made

    @functools.wraps(stock_forward)
    def forward(self: Any, x: "torch.Tensor", residual: "torch.Tensor | None" = None) -> Any:
        import torch

        local = x.shape[-1]
        handle = getattr(self, "commext_handle", 0)
        if not handle or residual is not None or local * self.tp_size != self.weight.shape[0]:
            return stock_forward(self, x, residual)
        weight = _shard(self.weight, self.tp_rank, local)
        out = torch.ops.vllm_commext.reduce_rms_norm(
            x.reshape(-1, local), weight, handle, self.variance_epsilon
        )
        return out.view(x.shape)

    patch({f"{FUSERS}:RMSNormFuser.fuse": fuse, f"{FUSERS}:TPAwareNormMixin.forward": forward})


def _is_spread(norm: Any, prefix: str, head_size: int) -> bool:
    """Check that a norm is that of all heads of Q or K; a rank has a part of each row then."""
    if type(norm).__name__ != "TPAwareRMSNorm" or norm.tp_size == 1 or not norm.has_weight:
        return False
    return prefix.rpartition(".")[2] in QK_NORMS and norm.weight.numel() > head_size


def put(model: str, action: Callable[[], None]) -> None:
    """Act where that model's norm fits; otherwise vLLM's own remains, with a line."""
    try:
        fits.admit(f"norm of {model}")
    except UnsupportedError as error:
        level = fits.level_of(error)
        logger.log(level, "commext: reduce_rms leaves %s to vLLM: %s", model, error)
    else:
        action()


@functools.cache
def install() -> None:
    """Monkey-patch vLLM in this process; UnsupportedError where the op lacks what it needs."""
    _check_needs()
    importlib.import_module("vllm_commext.reduce_rms.ops")  # registers the ops
    hooks.add_factor(IDENTITY, identity)
    put(MODEL, _install_minimax)
    models = {
        ATTENTION: (OLMOE.partition(":")[0], _install_attention),
        TRANSFORMERS: (FUSERS, _install_transformers),
    }
    for model, (module, install_in) in models.items():
        hooks.when_imported(module, functools.partial(put, model, install_in))


def _install_minimax() -> None:
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
