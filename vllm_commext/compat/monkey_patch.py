"""The one helper that monkey-patches symbols of vLLM, and the inventory of them.

It is the last resort, where vLLM offers no hook. A row of `INVENTORY` says what is replaced, why,
what guards it, which test covers it and when it can go. A sentinel on the owner of the name
remembers the original, so a second replacement is refused even if it comes from a second copy of
this package in the same process."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_commext.errors import ConfigError, UnsupportedError

SENTINEL = "__commext_originals__"
_INHERITED = object()


@dataclass(frozen=True)
class MonkeyPatch:
    symbols: tuple[str, ...]  # ``package.module:name`` or ``package.module:Class.name``
    why: str  # and why no hook of vLLM's would do
    guard: str  # that is checked before it is done
    test: str  # that covers it
    removal: str  # the condition on which it can go


_COMMUNICATORS = "vllm.distributed.device_communicators"
_CUDA = f"{_COMMUNICATORS}.cuda_communicator:CudaCommunicator"
_MINIMAX = "vllm.model_executor.layers.minimax_rms_norm"
INVENTORY: tuple[MonkeyPatch, ...] = (
    MonkeyPatch(
        (
            f"{_COMMUNICATORS}.shm_broadcast:MessageQueue",
            "vllm.v1.executor.multiproc_executor:MessageQueue",
            "vllm.v1.executor.ray_executor_v2:MessageQueue",
        ),
        why="our message queue replaces vLLM's, and vLLM has no hook for that",
        guard="`shm_queue` fits; the class is vLLM's own; the native extension is built",
        test="tests/contract/test_shm_queue.py",
        removal="vLLM lets an executor and a process group choose their queue's class",
    ),
    MonkeyPatch(
        (f"{_COMMUNICATORS}.cpu_communicator:CpuCommunicator.__init__",),
        why="a tensor-parallel group on CPUs gets our ring buffers instead of Gloo; no hook",
        guard="`cpu_collectives` fits; the native extension is built",
        test="tests/contract/test_cpu_collectives.py",
        removal="vLLM's own shared memory serves every CPU, not only AVX-512 and AArch64",
    ),
    MonkeyPatch(
        ("vllm.v1.engine.core:EngineCoreProc._process_engine_step",),
        why="an engine that only waits for the connector sleeps, and first tokens from elsewhere "
        "are sent before a step; vLLM steps on, and has no hook",
        guard="only where the connector is made, and each of the parts `engine step`, `nixl first "
        "token` and `pauses` fits",
        test="tests/contract/test_engine_wait.py",
        removal="vLLM lets a connector say when an engine without tokens has to step, and give a "
        "request its first token",
    ),
    MonkeyPatch(
        (
            "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache",
            "vllm.v1.engine.core:EngineCore.collective_rpc",
            "vllm.v1.engine.core:EngineCore.add_lora",
        ),
        why="tokens and blocks handed to other engines end with the weights and adapters that they "
        "come of; vLLM tells no connector of new ones, nor of a reset before it needs the blocks",
        guard="only where the engine's step is patched, too",
        test="tests/contract/test_resets.py",
        removal="vLLM tells connectors of new weights and adapters, and before it resets its "
        "caches",
    ),
    MonkeyPatch(
        (
            "vllm.v1.engine.output_processor:OutputProcessor.add_request",
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        ),
        why="tokens of an answer that began at another engine must reach parsers as they did "
        "there, and vLLM merges outputs, without a hook",
        guard="the part `nixl first token` fits; only requests that a router asks for so",
        test="tests/contract/test_resumed_answers.py",
        removal="vLLM lets an engine go on with an answer, or keeps outputs apart",
    ),
    MonkeyPatch(
        (
            f"{_MINIMAX}.lamport_workspace:get_allreduce_workspace",
            f"{_MINIMAX}.rms_norm_tp:MINIMAX_QK_NORM_MAX_TOKEN_NUM",
            f"{_MINIMAX}.rms_norm_tp:_MINIMAX_FUSED_AR_RMS_QK",
        ),
        why="our op replaces vLLM's for QK RMSNorm, and vLLM has no hook for that",
        guard="`reduce_rms` fits; the kernel's compiler is there",
        test="tests/contract/test_qk_norms.py",
        removal="vLLM lets a plugin choose the op of a tensor-parallel norm",
    ),
    MonkeyPatch(
        (
            f"{_CUDA}.__init__",
            f"{_CUDA}.all_reduce",
            f"{_CUDA}.destroy",
            f"{_CUDA}.checkpoint_prepare",
        ),
        why="each message goes to the backend measured fastest, for which vLLM has no hook",
        guard="`allreduce` fits; the platform is NVIDIA's",
        test="tests/contract/test_allreduce.py",
        removal="vLLM lets a plugin register an all-reduce backend and its place in the order",
    ),
    MonkeyPatch(
        ("vllm.compilation.passes.pass_manager:PostGradPassManager.configure",),
        why="our pass must come before vLLM's own fusion; what a user adds, vLLM puts at the end",
        guard="`fused_norm` fits; a group has kernels, and a table has them fastest",
        test="tests/contract/test_fused_pass.py",
        removal="vLLM lets a plugin say where among its passes its own is to come",
    ),
    MonkeyPatch(
        (f"{_COMMUNICATORS}.pynccl_wrapper:NCCLLibrary.exported_functions",),
        why="an older NCCL lacks two functions that only sleep mode calls; measuring needs neither",
        guard="only in processes that measure, and only for functions that the library lacks",
        test="tests/contract/test_allreduce.py",
        removal="vLLM treats the two as it treats its other optional functions",
    ),
)
SYMBOLS = frozenset(symbol for row in INVENTORY for symbol in row.symbols)


def _locate(symbol: str) -> tuple[Any, str]:
    module, _, path = symbol.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
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


def is_patched(symbol: str) -> bool:
    owner, name = _locate(symbol)
    return name in _originals(owner)


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


def _patch(symbol: str, replacement: Any) -> None:
    owner, name = _locate(symbol)
    if name in _originals(owner):
        raise UnsupportedError(f"{symbol} is patched already; restore it first")
    original = vars(owner).get(name, _INHERITED)
    are_functions = inspect.isfunction(original) and inspect.isfunction(replacement)
    if are_functions and not accepts(replacement, original):
        raise UnsupportedError(f"{symbol} takes {inspect.signature(original)} in this vLLM")
    setattr(owner, SENTINEL, {**_originals(owner), name: (original, replacement)})
    setattr(owner, name, replacement)


def patch(replacements: Mapping[str, Any]) -> None:
    """Put each replacement where its symbol is, or none of them.

    Raises:
        UnsupportedError: one is not there, is patched already, or is called otherwise.
        ConfigError: one is not in the inventory.
    """
    if unknown := replacements.keys() - SYMBOLS:
        raise ConfigError(f"expected symbols of the inventory in {__name__}, got {unknown}")
    done: list[str] = []
    try:
        for symbol, replacement in replacements.items():
            _patch(symbol, replacement)
            done.append(symbol)
    except Exception:
        restore(*reversed(done))
        raise


def wrap(makers: Mapping[str, Callable[[Any], Any]]) -> None:
    """Put what each makes of vLLM's original in its place, or none; nothing where they are patched
    already. Raises as `patch`."""
    if not all(map(is_patched, makers)):
        patch({symbol: make(original_of(symbol)) for symbol, make in makers.items()})


def restore(*symbols: str) -> None:
    """Put the originals back; UnsupportedError where one is not patched, or patched after us."""
    for symbol in symbols:
        owner, name = _locate(symbol)
        if name not in _originals(owner):
            raise UnsupportedError(f"{symbol} is not patched, so there is nothing to restore")
        original, replacement = _originals(owner)[name]
        if vars(owner).get(name) is not replacement:
            raise UnsupportedError(f"{symbol} was patched by somebody else after us")
        if original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
        kept = {key: pair for key, pair in _originals(owner).items() if key != name}
        if kept:
            setattr(owner, SENTINEL, kept)
        else:
            delattr(owner, SENTINEL)
