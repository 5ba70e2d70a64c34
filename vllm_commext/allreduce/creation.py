"""Creates a group's dispatcher from a table as an engine starts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_commext.allreduce import cache, flashinfer, limits, push
from vllm_commext.allreduce.backend import Backend, CustomBackend, NcclBackend
from vllm_commext.allreduce.cache import find_table
from vllm_commext.allreduce.dispatcher import Dispatcher
from vllm_commext.allreduce.flashinfer import MAX_MESSAGE_BYTES, is_compiled
from vllm_commext.allreduce.limits import ITEM_BYTES
from vllm_commext.allreduce.machine import NO_ACCESS, Machine
from vllm_commext.allreduce.table import Table, describe
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger("vllm.commext.allreduce")

OUR_KERNEL = "our own kernel"


@dataclass(frozen=True)
class Parts:
    """Communicators and device that a group has already; `cpu_group` sends objects without a GPU,
    `custom` is vLLM's custom all-reduce and `pynccl` its binding of NCCL, None where disabled."""

    cpu_group: "ProcessGroup"
    device_group: "ProcessGroup | None"
    device: "torch.device"
    custom: Any = None
    pynccl: Any = None


Maker = Callable[[], Backend]


def _flashinfer(parts: Parts, table: Table | None) -> Backend:
    # FlashInfer's compiler takes minutes: only a table measured here makes an engine wait for it.
    may_compile = table is None or not table.origin.startswith(cache.ORIGIN)
    if not may_compile and not is_compiled():
        raise UnsupportedError(
            "its kernels are not compiled, which takes minutes; `vllm-commext tune allreduce "
            "--hidden SIZE` compiles and measures them for a model's hidden size"
        )
    largest = _largest(table, limits.FLASHINFER_ONE_SHOT, MAX_MESSAGE_BYTES)
    return flashinfer.FlashInferBackend(parts.cpu_group, largest)


def _largest(table: Table | None, name: str, otherwise: int) -> int:
    if table is None:
        return otherwise
    led = (table.leads_up_to(dtype, name) for dtype in table.rows)
    return min(max(led, default=0), otherwise)


def _makers(
    parts: Parts,
    collective: Collective,
    table: Table | None,
    wanted: Sequence[str],
    most_bytes: int,
) -> dict[str, Maker]:
    makers: dict[str, Maker] = {}
    if limits.CUSTOM in wanted:
        makers["vLLM's custom all-reduce"] = lambda: CustomBackend(parts.custom)
    if limits.FLASHINFER_ONE_SHOT in wanted:
        makers["FlashInfer"] = lambda: _flashinfer(parts, table)
    if limits.PUSH in wanted and collective.world_size in limits.PUSH_WORLD_SIZES:
        # Larger messages go in parts, so what no message reaches need not be there.
        bound = min(push.MAX_MESSAGE_BYTES, most_bytes or push.MAX_MESSAGE_BYTES)
        led = _largest(table, limits.PUSH, bound)
        fused = table.leads_fused(limits.FUSED_PUSH) if table is not None else 0
        num_bytes = max(led, min(fused, bound))
        makers[OUR_KERNEL] = lambda: push.PushBackend(num_bytes, collective)
    makers["NCCL"] = lambda: NcclBackend(parts.pynccl, parts.device_group)
    return makers


def _make_together(what: str, maker: Maker, collective: Collective) -> list[Backend]:
    """Make a backend on all ranks, or on none, with one line why."""
    try:  # our own kernel agrees with the other ranks by itself
        return [maker() if what == OUR_KERNEL else collective.agree(maker)]
    except UnsupportedError as error:
        if collective.rank == 0:
            logger.warning("commext: allreduce: without %s on all ranks: %s", what, error)
        return []


def create_dispatcher(
    parts: Parts,
    table: Table | None,
    forced: str | None = None,
    wanted: Sequence[str] | None = None,
    most_bytes: int = 0,
) -> Dispatcher:
    """Create the dispatcher of a group; collective, outside a capture.

    Args:
        table: rank 0's serves all.
        forced: see `Dispatcher`.
        wanted: backends to create, in order to measure them; None for those of the table.
        most_bytes: of the largest message to come, alike on all ranks; 0 where unknown.

    All ranks raise UnsupportedError where they differ in their settings, or one cannot take part.
    """
    collective = Collective.over(parts.cpu_group)
    named = None if wanted is None else tuple(wanted)
    of_ranks = collective.run(lambda: ((forced, named), table))
    settings = [settings for settings, _ in of_ranks]
    if len(set(settings)) != 1:
        raise UnsupportedError(
            f"expected the same settings on all ranks, got {settings} (forced backend, "
            "backends to measure); set the toggles alike"
        )
    table = of_ranks[0][1]
    chosen = wanted_backends(table, forced) if named is None else named
    sized_by = table if named is None and forced is None else None
    backends: list[Backend] = []
    try:
        for what, maker in _makers(parts, collective, sized_by, chosen, most_bytes).items():
            backends += _make_together(what, maker, collective)
    except BaseException:
        for backend in backends:
            backend.destroy()
        raise
    return Dispatcher(backends, collective.world_size, table, forced)


def wanted_backends(table: Table | None, forced: str | None) -> tuple[str, ...]:
    """The backends that a table has first somewhere or the user forces, in the order of
    `limits.BACKENDS`; what they cannot take goes to NCCL."""
    rows = [row for of in table.rows.values() for row in of] if table else []
    ranked = {forced} if forced is not None else {row.ranking[0] for row in rows}
    if forced is None and table is not None and table.leads_fused(limits.FUSED_PUSH):
        ranked.add(limits.PUSH)  # whose memory the fused kernels use
    return tuple(name for name in limits.BACKENDS if name in ranked)


ANY_HOST = ""


@dataclass(frozen=True)
class Facts:
    """One rank's host, engine and settings, which decide whether our kernels take part in a
    tensor-parallel group; all ranks agree about them before anything is made, set or chosen."""

    host: str = ANY_HOST
    gpu: str = ""  # the driver's name of it; empty where there is none
    dtype: str = "bfloat16"  # of the model
    hidden: int = 8192  # elements of a row
    max_tokens: int = 0  # rows of the largest step; 0 where unknown
    eager: bool = False
    invariant: bool = False  # a row has the same bits whatever else is in the batch
    microbatches: bool = False  # a batch runs in parts on several streams
    multicast: bool = False  # vLLM's own collectives may use NVLink multicast here
    settings: tuple[str, ...] = ()  # the toggles that matter, as ``NAME=value``


@dataclass(frozen=True)
class Requirements:
    """Requirements of a group's all-reduce, the same on all ranks.

    Attributes:
        forced: the one backend to use, or None for the fastest.
        use_cache: read what `vllm-commext tune allreduce` measured here.
        by_itself: `auto`: only kernels of ours take part, where a table has them first.
    """

    forced: str | None = None
    use_cache: bool = True
    by_itself: bool = False
    facts: Facts = Facts()

    @property
    def only(self) -> str | None:
        """The one backend that may serve, or None for the fastest.

        Batch invariance asks for one order of sums. Ours has one for messages of any size, and a
        row's numbers do not depend on the others."""
        return limits.PUSH if self.facts.invariant else self.forced

    @property
    def most_bytes(self) -> int:
        return self.facts.max_tokens * self.facts.hidden * ITEM_BYTES[self.facts.dtype]


def why_none(required: Requirements) -> str:
    facts = required.facts
    if facts.microbatches:
        return "microbatches run on two streams, and a workspace serves one"
    if facts.eager and required.forced is None:
        return "the engine is eager, and a call would cost the host more than the GPU gains"
    if facts.invariant and required.forced not in (None, limits.PUSH):
        return (
            f"VLLM_BATCH_INVARIANT asks for one order of sums, for which {required.forced} is none"
        )
    return ""


def start_dispatcher(
    parts: Parts, required: Requirements, read_machine: Callable[[], Machine]
) -> Dispatcher | None:
    """Create the group's dispatcher, or None where vLLM's default dispatch should serve. All ranks
    raise UnsupportedError where a step failed on one."""
    collective = Collective.over(parts.cpu_group)
    if reason := why_none(required):
        return _none(reason, collective)
    hidden = required.facts.hidden

    def look() -> tuple[Machine, Table | None]:
        machine = read_machine()
        in_engines = required.by_itself and not required.facts.invariant
        return machine, find_table(
            *(machine, collective.world_size, hidden),
            use_cache=required.use_cache,
            in_engines=in_engines,
        )

    machine, table = collective.run(look)[0]
    if machine.link == NO_ACCESS and required.forced is None:
        return _none("its GPUs have no peer access to each other", collective)
    if required.by_itself:
        if table is None:
            reason = "engines were not measured on these GPUs, and no `vllm-commext tune` was"
            return _none(reason, collective)
        if required.facts.multicast and not required.facts.invariant:
            reason = "vLLM may use NVLink multicast here, and tables are measured without it"
            return _none(reason, collective)
        table = table.of_ours(required.facts.dtype)
        if table is None:
            return _none("no table has a kernel of ours first here", collective)
    dispatcher = create_dispatcher(parts, table, required.only, most_bytes=required.most_bytes)
    if dispatcher.table is None and required.forced is None:
        reason = "this machine is not known"
    elif required.facts.invariant and required.only not in dispatcher.backends:
        reason = "VLLM_BATCH_INVARIANT asks for one order of sums, and our kernel cannot be had"
    elif limits.PUSH not in dispatcher.backends and required.by_itself:
        reason = "our kernel cannot be had"
    else:
        return dispatcher
    dispatcher.destroy()
    return _none(reason, collective)


def _none(reason: str, collective: Collective) -> None:
    if collective.rank == 0:
        logger.info("commext: allreduce: vLLM's default dispatch serves: %s", reason)


def lines(dispatcher: Dispatcher, required: Requirements) -> list[str]:
    made = ", ".join(dispatcher.backends)
    if required.only is not None:
        why = "forced" if required.forced else "all that VLLM_BATCH_INVARIANT allows"
        return [f"{required.only} is {why}; made on all ranks: {made}"]
    if required.by_itself:
        return [f"takes part by itself: {'; '.join(describe(dispatcher.table))}"]
    return [f"made on all ranks: {made}", *describe(dispatcher.table)]
