"""Our dispatcher inside vLLM's communicator of the GPUs.

The class stays vLLM's own, for parts of vLLM compare it: four of its methods are patched. Each
tensor-parallel communicator gets a dispatcher when it is made, asks it first in every all-reduce,
and gives it back before its own parts go. What the dispatcher leaves takes vLLM's default dispatch.

Under `auto` the methods are patched only in workers that may have a peer, and restored where their
group gets no dispatcher."""

import functools
import importlib
import logging
import multiprocessing
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_commext.compat import fits, hooks, tp_group
from vllm_commext.compat.monkey_patch import restore, wrap
from vllm_commext.errors import UnsupportedError
from vllm_commext.settings import read_settings

if TYPE_CHECKING:
    import torch

    from vllm_commext.allreduce.creation import Facts, Requirements
    from vllm_commext.allreduce.dispatcher import Dispatcher, FusedPolicy
    from vllm_commext.collective import Collective

logger = logging.getLogger("vllm.commext.allreduce")

COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator"
ATTRIBUTE = "_commext_allreduce"
AUTO = "auto"
ALONE = ("MainProcess", "EngineCore")  # processes whose names begin so run a model on one GPU
PART, FUSED_NORM = "allreduce", "fused_norm"
_served: "weakref.WeakSet[Any]" = weakref.WeakSet()  # communicators
SELF_TEST_ROWS = (1, 32, 512)  # about both ends of a table


def dispatcher_of(communicator: Any) -> "Dispatcher | None":
    return vars(communicator).get(ATTRIBUTE)


def why_not(communicator: Any, by_itself: bool = False) -> str:
    """Reason why a communicator gets no dispatcher; empty where its ranks are to agree about one.

    It asks no other rank. The same on all ranks."""
    from vllm.config import get_current_vllm_config_or_none

    if communicator.unique_name.split(":")[0] != "tp" or communicator.world_size < 2:
        return "it is no tensor-parallel group of several ranks"
    if by_itself:
        config = get_current_vllm_config_or_none()
        return tp_group.why_not_by_itself(config, communicator.world_size)
    return ""


def _requirements(facts: "Facts") -> "Requirements":
    from vllm_commext.allreduce.creation import Requirements

    settings = read_settings()
    forced = settings["allreduce_backend"]
    return Requirements(
        None if forced == AUTO else forced,
        settings["allreduce_tune"] == "cached",
        is_by_itself(),
        facts,
    )


def is_by_itself() -> bool:
    """True under `auto`: ours takes part only where it is faster."""
    settings = read_settings()
    return settings["allreduce"] == AUTO and settings["allreduce_backend"] == AUTO


def _serve_fused_op(
    communicator: Any, made: "Dispatcher", required: "Requirements", steps: "Collective"
) -> None:
    """Let the group's name serve our fused op, with kernels where it has memory for them, and
    vLLM's models use it where a table has it faster; in all where batches must be invariant."""
    from vllm_commext.allreduce import limits
    from vllm_commext.allreduce.dispatcher import FusedPolicy
    from vllm_commext.allreduce.fused import op as fused_op
    from vllm_commext.allreduce.fused.kernels import FusedKernels, PushFused
    from vllm_commext.allreduce.push import PushBackend
    from vllm_commext.collective import Collective

    push = made.backends.get(limits.PUSH)
    ours = None
    if isinstance(push, PushBackend):
        kernels = FusedKernels(push.memory, Collective.over(communicator.cpu_group))
        ours = PushFused(kernels, communicator.world_size)
    apart = fused_op.after_all_reduce(communicator.all_reduce)
    policy = FusedPolicy(made.table, required.only, throughout=required.by_itself)
    fused_op.register_group(communicator.unique_name, fused_op.FusedNorm(apart, ours, policy))
    if ours is None:
        return
    if _may_fuse(steps, communicator.device):
        _use_in_passes(policy, required.facts)


def _may_fuse(steps: "Collective", device: "torch.device") -> bool:
    """Decide on all ranks whether graphs get the op; else say why vLLM's own fusion remains."""
    problem, level = "", logging.WARNING
    try:
        fits.admit(FUSED_NORM)
        from vllm_commext.compat import fused_pass

        if fits.must_test_itself(FUSED_NORM):
            fused_pass.self_test(device)
    except Exception as error:  # noqa: BLE001 - vLLM's own is there
        problem, level = f"{type(error).__name__}: {error}", fits.level_of(error)
    problems = [found for found in steps.allgather(problem) if found]
    if problems and steps.rank == 0:
        logger.log(level, "commext: allreduce: %s is left to vLLM: %s", FUSED_NORM, problems[0])
    return not problems


def _use_in_passes(policy: "FusedPolicy", facts: "Facts") -> None:
    from vllm.config import get_current_vllm_config_or_none

    from vllm_commext.allreduce.limits import ITEM_BYTES
    from vllm_commext.compat import fused_pass

    fused_pass.install()
    config = get_current_vllm_config_or_none()
    if config is not None:
        row_bytes = facts.hidden * ITEM_BYTES[facts.dtype]
        fused_pass.split_ranges(config, policy.changes(facts.dtype), row_bytes)


def attach(communicator: Any) -> None:
    """Give a communicator its dispatcher, or say in one line why not; collective."""
    name = communicator.unique_name or "unnamed"
    try:
        if reason := why_not(communicator, is_by_itself()):
            logger.debug("commext: allreduce: not for group %s: %s", name, reason)
            return
        try:
            _attach(communicator, name)
        except fits.DIFFERENCES as error:
            level = logging.INFO if is_by_itself() else logging.WARNING
            line = "commext: allreduce: vLLM's default dispatch serves group %s: %s"
            logger.log(level, line, name, error)
    finally:
        if name.startswith("tp:") and is_by_itself() and not _served:
            _restore()


def _attach(communicator: Any, name: str) -> None:
    from vllm_commext.allreduce import creation
    from vllm_commext.allreduce.creation import Parts
    from vllm_commext.allreduce.machine import read_machine
    from vllm_commext.collective import Collective

    facts = tp_group.agreed(communicator.cpu_group, communicator.device)
    custom = communicator.ca_comm
    parts = Parts(
        communicator.cpu_group,
        communicator.device_group,
        communicator.device,
        None if custom is None or custom.disabled else custom,
        communicator.pynccl_comm,
    )
    required = _requirements(facts)
    made = creation.start_dispatcher(parts, required, lambda: read_machine(parts.device))
    if made is None:
        return
    vars(communicator)[ATTRIBUTE] = made
    _served.add(communicator)
    try:
        steps = Collective.over(parts.cpu_group)
        if fits.must_test_itself(PART):
            steps.agree(lambda: _self_test(communicator, made))
        steps.agree(lambda: _serve_fused_op(communicator, made, required, steps))
    except UnsupportedError:
        _give_back(communicator)
        raise
    if communicator.rank == 0:
        for line in creation.lines(made, required):
            logger.info("commext: allreduce: group %s: %s", name, line)


def _self_test(communicator: Any, made: "Dispatcher") -> None:
    """Compare the sums of all backends with the group's. No rank leaves before the end, as
    others would wait for it."""
    import torch
    from torch import distributed

    from vllm_commext.allreduce.limits import Message

    facts = tp_group.agreed(communicator.cpu_group, communicator.device)
    wrong: list[str] = []
    for rows in SELF_TEST_ROWS:
        shape, dtype = (rows, facts.hidden), getattr(torch, facts.dtype)
        part = torch.randn(shape, device=communicator.device, dtype=dtype)
        wanted = part.float()
        distributed.all_reduce(wanted, group=communicator.device_group)
        message = Message(shape, facts.dtype)
        for name, backend in made.backends.items():
            if not backend.takes(message):
                continue
            backend.prepare(message)
            if not backend.is_ready(message):
                continue
            found = backend.all_reduce(part).float()
            if not torch.allclose(found, wanted, rtol=0.1, atol=0.1):
                wrong.append(f"{rows} rows by {name}")
    if wrong:
        raise UnsupportedError(f"sums that are not the group's: {', '.join(wrong)}")


def _give_back(communicator: Any) -> tuple[Any, Any]:
    """Take a communicator's dispatcher, whose memory is freed, and its fused op from it."""
    fused_op = importlib.import_module("vllm_commext.allreduce.fused.op")
    norm = fused_op.find_group(communicator.unique_name)
    fused_op.forget_group(communicator.unique_name)
    tp_group.forget(communicator.cpu_group)
    ours = vars(communicator).pop(ATTRIBUTE, None)
    _served.discard(communicator)
    if ours is not None:
        ours.destroy()
    return ours, norm


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - vLLM's name
        original(self, *args, **kwargs)
        attach(self)

    return __init__


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(self: Any, input_: "torch.Tensor") -> "torch.Tensor":
        ours = vars(self).get(ATTRIBUTE)
        out = ours.all_reduce(input_) if ours is not None else None
        return original(self, input_) if out is None else out

    return all_reduce


def _destroy(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def destroy(self: Any) -> None:
        if dispatcher_of(self) is not None:
            ours, norm = _give_back(self)
            served, refused = ours.counts()
            logger.info(
                "commext: allreduce: calls by backend %s, refusals %s, with residual and norm %s",
                *(dict(served), dict(refused), dict(norm.calls) if norm is not None else {}),
            )
        original(self)

    return destroy


def _checkpoint_prepare(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def checkpoint_prepare(self: Any) -> None:
        if dispatcher_of(self) is not None:
            raise UnsupportedError(
                "the all-reduce communicator's buffers are mapped by other ranks, which a "
                "checkpoint cannot keep; set VLLM_COMMEXT_ALLREDUCE=0"
            )
        original(self)

    return checkpoint_prepare


METHODS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    f"{COMMUNICATOR}.__init__": _init,
    f"{COMMUNICATOR}.all_reduce": _all_reduce,
    f"{COMMUNICATOR}.destroy": _destroy,
    f"{COMMUNICATOR}.checkpoint_prepare": _checkpoint_prepare,
}


def install() -> None:
    """Monkey-patch vLLM in this process; UnsupportedError on a platform that is not NVIDIA's."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise UnsupportedError(f"expected an NVIDIA GPU, got {current_platform.device_name}")
    if is_by_itself():
        hooks.when_imported(COMMUNICATOR.partition(":")[0], _patch_where_it_may_serve)
    else:
        wrap(METHODS)


def _patch_where_it_may_serve() -> None:
    """Patch in a worker of vLLM's executor `mp` that sees two GPUs or more. What else it takes, the
    ranks decide together when their group is made."""
    import torch

    from vllm_commext.allreduce.machine import is_refused

    is_alone = multiprocessing.current_process().name.startswith(ALONE)
    if not is_alone and torch.cuda.device_count() > 1 and not is_refused():
        wrap(METHODS)


def _restore() -> None:
    try:
        restore(*METHODS)
    except UnsupportedError as error:  # ours then asks for a dispatcher that is not there
        logger.debug("commext: allreduce: vLLM's methods stay wrapped: %s", error)
