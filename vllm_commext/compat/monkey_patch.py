"""The one helper that monkey-patches symbols of vLLM, and the inventory of them.

It is the last resort, where vLLM offers no hook. A row in `INVENTORY` says what is replaced, why,
what guards it, which test covers it and when it can go. A sentinel on the owner of the name
remembers the original, so a second replacement is refused even if it comes from a second copy of
this package in the same process.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_commext.errors import ConfigError, UnsupportedError

SENTINEL = "__commext_originals__"
_INHERITED = object()


@dataclass(frozen=True)
class MonkeyPatch:
    """One row of the inventory."""

    symbol: str  # ``package.module:name`` or ``package.module:Class.name``
    why: str  # and why no hook of vLLM's would do
    guard: str  # that is checked before it is done
    test: str  # that covers it
    removal: str  # the condition on which it can go


_QUEUE = {
    "why": "our message queue replaces vLLM's, and vLLM has no hook for that",
    "guard": "`shm_queue` fits; the class is vLLM's own; the native extension is built",
    "test": "tests/contract/test_shm_queue.py",
    "removal": "vLLM lets an executor and a process group choose their queue's class",
}
_NORM = {
    "why": "our op replaces vLLM's for QK RMSNorm, and vLLM has no hook for that",
    "guard": "its norm fits; the kernel's compiler is there",
    "test": "tests/contract/test_qk_norms.py",
    "removal": "vLLM lets a plugin choose the op of a tensor-parallel norm",
}
_SPREAD_NORM = {
    **_NORM,
    "guard": "its norm fits, when vLLM imports it; the kernel's compiler is there",
}
_SUM = {
    "why": "each message goes to the backend measured fastest, for which vLLM has no hook",
    "guard": "`allreduce` fits; the platform is NVIDIA's",
    "test": "tests/contract/test_allreduce.py",
    "removal": "vLLM lets a plugin register an all-reduce backend and its place in the order",
}
_EAGER = {
    "why": "models that run without compiler passes call this helper, which has no hook",
    "guard": "`fused_eager` fits; a table has our op fastest for the message",
    "test": "tests/contract/test_fused_eager.py",
    "removal": "vLLM lets a plugin choose the op of its eager helpers",
}
_RESET = {
    "why": "tokens and blocks handed to other engines end with the weights and adapters that they "
    "come of; vLLM tells no connector of new ones, nor of a reset before it needs the blocks",
    "guard": "only where the engine's step is patched, too",
    "test": "tests/contract/test_resets.py",
    "removal": "vLLM tells connectors of new weights and adapters, and before it resets its caches",
}
_RESUMED = {
    "why": "tokens of an answer that began at another engine must reach parsers as they did there, "
    "and vLLM merges outputs, without a hook",
    "guard": "the part `nixl first token` fits; only requests with such an answer",
    "test": "tests/contract/test_resumed_answers.py",
    "removal": "vLLM lets an engine go on with an answer, or keeps outputs apart",
}
_COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator"
_MINIMAX = "vllm.model_executor.layers.minimax_rms_norm"
_MODELS = "vllm.model_executor.models"
INVENTORY: tuple[MonkeyPatch, ...] = (
    MonkeyPatch("vllm.distributed.device_communicators.shm_broadcast:MessageQueue", **_QUEUE),
    MonkeyPatch("vllm.v1.executor.multiproc_executor:MessageQueue", **_QUEUE),
    MonkeyPatch("vllm.v1.executor.ray_executor_v2:MessageQueue", **_QUEUE),
    MonkeyPatch(
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.__init__",
        why="a tensor-parallel group on CPUs gets our ring buffers instead of Gloo; no hook",
        guard="`cpu_collectives` fits; the native extension is built",
        test="tests/contract/test_cpu_collectives.py",
        removal="vLLM's own shared memory serves every CPU, not only those with AVX-512",
    ),
    MonkeyPatch(
        "vllm.v1.engine.core:EngineCoreProc._process_engine_step",
        why="an engine that only waits for the connector sleeps, and first tokens from elsewhere "
        "are sent before a step; vLLM steps on, and has no hook",
        guard="only where the connector is made, and each of the parts `engine step`, `nixl first "
        "token` and `pauses` fits",
        test="tests/contract/test_engine_wait.py",
        removal="vLLM lets a connector say when an engine without tokens has to step, and give a "
        "request its first token",
    ),
    MonkeyPatch("vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache", **_RESET),
    MonkeyPatch("vllm.v1.engine.core:EngineCore.collective_rpc", **_RESET),
    MonkeyPatch("vllm.v1.engine.core:EngineCore.add_lora", **_RESET),
    MonkeyPatch("vllm.v1.engine.output_processor:OutputProcessor.add_request", **_RESUMED),
    MonkeyPatch("vllm.v1.engine.output_processor:OutputProcessor.process_outputs", **_RESUMED),
    MonkeyPatch(f"{_MINIMAX}.lamport_workspace:get_allreduce_workspace", **_NORM),
    MonkeyPatch(f"{_MINIMAX}.rms_norm_tp:MINIMAX_QK_NORM_MAX_TOKEN_NUM", **_NORM),
    MonkeyPatch(f"{_MINIMAX}.rms_norm_tp:_MINIMAX_FUSED_AR_RMS_QK", **_NORM),
    *(
        MonkeyPatch(f"{_MODELS}.olmoe:OlmoeAttention.{method}", **_SPREAD_NORM)
        for method in ("__init__", "_apply_qk_norm")
    ),
    MonkeyPatch(f"{_MODELS}.transformers.fusers.rms_norm:RMSNormFuser.fuse", **_SPREAD_NORM),
    MonkeyPatch(f"{_MODELS}.transformers.fusers.rms_norm:TPAwareNormMixin.forward", **_SPREAD_NORM),
    MonkeyPatch(f"{_COMMUNICATOR}.__init__", **_SUM),
    MonkeyPatch(f"{_COMMUNICATOR}.all_reduce", **_SUM),
    MonkeyPatch(f"{_COMMUNICATOR}.destroy", **_SUM),
    MonkeyPatch(f"{_COMMUNICATOR}.checkpoint_prepare", **_SUM),
    MonkeyPatch(
        "vllm.compilation.passes.pass_manager:PostGradPassManager.configure",
        why="our pass must come before vLLM's own fusion; what a user adds, vLLM puts at the end",
        guard="`fused_norm` fits; a group has kernels, and a table has them fastest",
        test="tests/contract/test_fused_pass.py",
        removal="vLLM lets a plugin say where among its passes its own is to come",
    ),
    MonkeyPatch(
        "vllm.models.common.ops.fused_allreduce_rms_norm:fused_allreduce_rms_norm", **_EAGER
    ),
    MonkeyPatch(
        "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm:fused_allreduce_gemma_rms_norm",
        **_EAGER,
    ),
    MonkeyPatch(
        "vllm.distributed.device_communicators.pynccl_wrapper:NCCLLibrary.exported_functions",
        why="an older NCCL lacks two functions that only sleep mode calls; measuring needs neither",
        guard="only in processes that measure, and only for functions that the library lacks",
        test="tests/contract/test_allreduce.py",
        removal="vLLM treats the two as it treats its other optional functions",
    ),
)


def row_of(symbol: str) -> MonkeyPatch:
    """The inventory's row; ConfigError for a symbol without, which may not be monkey-patched."""
    for row in INVENTORY:
        if row.symbol == symbol:
            return row
    raise ConfigError(f"expected a symbol of the inventory in {__name__}, got {symbol!r}")


def _locate(symbol: str) -> tuple[Any, str]:
    module_name, colon, path = symbol.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"expected a symbol such as 'package.module:Class.name', got {symbol!r}")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"{symbol} was to be patched and is not there ({error}); this vLLM has renamed it"
        ) from error
    return owner, name


def _originals(owner: Any) -> dict[str, tuple[Any, Any]]:
    """The original and the replacement of each name patched on this owner itself."""
    return vars(owner).get(SENTINEL, {})


def original_of(symbol: str) -> Any:
    """Find what vLLM had at the symbol, whether it is patched now or not; raises as `patch`."""
    owner, name = _locate(symbol)
    if name not in _originals(owner):
        return getattr(owner, name)
    before = _originals(owner)[name][0]
    if before is _INHERITED:
        return getattr(super(owner, owner), name)
    is_bound = isinstance(owner, type) and hasattr(before, "__get__")
    return before.__get__(None, owner) if is_bound else before


def accepts(ours: Any, theirs: Any) -> bool:
    """Return whether `ours` takes each call that `theirs` takes, by position or by name."""
    first, *others = [*inspect.signature(theirs).parameters.values(), None]
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {each.name: None for each in others if each is not None and each.kind in plain}
    own = inspect.signature(ours, follow_wrapped=False)
    try:
        own.bind(*([] if first is None else [None]), **named)
    except TypeError:
        return False
    return True


def patch(row: MonkeyPatch, replacement: Any) -> None:
    """Put `replacement` where the row's symbol is; UnsupportedError where that is not there, is
    patched already, or is called otherwise."""
    owner, name = _locate(row.symbol)
    if name in _originals(owner):
        raise UnsupportedError(f"{row.symbol} is patched already; restore it first")
    original = vars(owner).get(name, _INHERITED)
    are_functions = inspect.isfunction(original) and inspect.isfunction(replacement)
    if are_functions and not accepts(replacement, original):
        raise UnsupportedError(f"{row.symbol} takes {inspect.signature(original)} in this vLLM")
    setattr(owner, SENTINEL, {**_originals(owner), name: (original, replacement)})
    setattr(owner, name, replacement)


def patch_all(replacements: Mapping[str, Any]) -> None:
    """Put each replacement where its symbol is, or none of them; raises as `patch`."""
    done: list[MonkeyPatch] = []
    try:
        for symbol, replacement in replacements.items():
            row = row_of(symbol)
            patch(row, replacement)
            done.append(row)
    except Exception:
        for row in reversed(done):
            restore(row)
        raise


def restore(row: MonkeyPatch) -> None:
    """Put the original back; UnsupportedError where it is not patched, or patched after us."""
    owner, name = _locate(row.symbol)
    if name not in _originals(owner):
        raise UnsupportedError(f"{row.symbol} is not patched, so there is nothing to restore")
    original, replacement = _originals(owner)[name]
    if vars(owner).get(name) is not replacement:
        raise UnsupportedError(f"{row.symbol} was patched by somebody else after us")
    if original is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
    kept = {key: pair for key, pair in _originals(owner).items() if key != name}
    if kept:
        setattr(owner, SENTINEL, kept)
    else:
        delattr(owner, SENTINEL)


def is_patched(row: MonkeyPatch) -> bool:
    owner, name = _locate(row.symbol)
    return name in _originals(owner)
