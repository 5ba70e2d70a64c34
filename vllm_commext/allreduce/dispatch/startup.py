"""A group's dispatcher as an engine starts: from a table, or measured while it warms up."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from vllm_commext.allreduce import names, peers
from vllm_commext.allreduce.backends.flashinfer_workspaces import is_compiled
from vllm_commext.allreduce.dispatch.creation import Parts, create_dispatcher
from vllm_commext.allreduce.dispatch.dispatcher import Dispatcher
from vllm_commext.allreduce.message import ITEM_BYTES
from vllm_commext.allreduce.table import cache, measure, tuning
from vllm_commext.allreduce.table.machine import NO_ACCESS, Machine
from vllm_commext.allreduce.table.measure import KIB, MIB, Options
from vllm_commext.allreduce.table.selection import describe, find_table
from vllm_commext.allreduce.table.table import Table
from vllm_commext.collective import Collective
from vllm_commext.gpu.facts import Facts

logger = logging.getLogger("vllm.commext.allreduce")

BUILT_IN, CACHED, STARTUP = "0", "cached", "startup"
STARTUP_SIZES = (8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
STARTUP_SECONDS = 8.0
IN_ORDER = (names.PUSH, names.HOST)  # they add in the order of ranks, whatever the size


@dataclass(frozen=True)
class Requirements:
    """What is wanted of a group's all-reduce, the same on all ranks.

    Attributes:
        forced: the one backend to use, or None for the fastest.
        tune: `BUILT_IN`, `CACHED` or `STARTUP`.
        by_itself: nobody has asked for it: only kernels of ours take part, and only where a table
            that holds for this machine has them first.
        facts: what all ranks have agreed about.
    """

    forced: str | None = None
    tune: str = CACHED
    by_itself: bool = False
    facts: Facts = Facts()

    @property
    def only(self) -> str | None:
        """The one backend that may serve, or None for the fastest. One adds in one order; ours
        do for messages of any size, and a row's numbers do not depend on the others."""
        if self.facts.invariant and self.forced not in IN_ORDER:
            return names.PUSH
        return self.forced

    @property
    def most_bytes(self) -> int:
        """Of the largest message of rows that the engine can have; 0 where nobody knows."""
        return self.facts.max_tokens * self.facts.hidden * ITEM_BYTES[self.facts.dtype]


def why_none(required: Requirements) -> str:
    """Why a group gets no dispatcher; empty where it gets one."""
    facts = required.facts
    if facts.microbatches:
        return "microbatches run on two streams, and a workspace serves one"
    if facts.eager and required.forced is None:
        return "the engine is eager, and a call would cost the host more than the GPU gains"
    if facts.invariant and required.forced not in (None, *IN_ORDER):
        return (
            f"VLLM_BATCH_INVARIANT asks for one order of sums, for which {required.forced} is none"
        )
    return ""


def _holds(table: Table, machine: Machine, required: Requirements) -> bool:
    """Whether a table compares ours with all that vLLM has here: those without multicast do not
    where vLLM may use it, as it does not where a row must have the same bits in any batch."""
    return machine.multicast or required.facts.invariant or not required.facts.multicast


def start_dispatcher(
    parts: Parts, required: Requirements, read_machine: Callable[[], Machine]
) -> Dispatcher | None:
    """The group's dispatcher, or None where vLLM's default dispatch should serve; collective.

    Raises:
        UnsupportedError: a step failed on some rank; all of them raise it.
    """
    collective = Collective.over(parts.cpu_group)
    if reason := why_none(required):
        return _none(reason, collective)
    hidden = required.facts.hidden
    startup = required.tune == STARTUP and required.only is None and not required.by_itself

    def look() -> tuple[Machine, Table | None]:
        machine = read_machine()
        if startup:
            return machine, cache.load(machine, collective.world_size, hidden)
        use_cache = required.tune != BUILT_IN
        in_engines = required.by_itself and not required.facts.invariant
        found = find_table(
            machine, collective.world_size, hidden, use_cache=use_cache, in_engines=in_engines
        )
        return machine, found

    machine, table = collective.run(look)[0]
    if startup and table is None:
        return _measured(parts, required, machine)
    if required.by_itself:
        if table is None:
            return _none(
                "engines were not measured on these GPUs, and no `vllm-commext tune` was",
                collective,
            )
        if not _holds(table, machine, required):
            return _none(
                "vLLM may use NVLink multicast here, and the table was measured without it",
                collective,
            )
        table = table.of_ours(required.facts.dtype)
        if table is None:
            return _none("no table has a kernel of ours first here", collective)
    dispatcher = create_dispatcher(parts, table, required.only, most_bytes=required.most_bytes)
    if dispatcher.table is None and required.forced is None:
        reason = "this machine is not known"
    elif required.facts.invariant and required.only not in dispatcher.backends:
        reason = "VLLM_BATCH_INVARIANT asks for one order of sums, and our kernel cannot be had"
    elif names.PUSH not in dispatcher.backends and required.by_itself:
        reason = "our kernel cannot be had"
    else:
        return dispatcher
    dispatcher.destroy()
    return _none(reason, collective)


def _none(reason: str, collective: Collective) -> None:
    if collective.rank == 0:
        logger.info("commext: allreduce: vLLM's default dispatch serves: %s", reason)


def _measured(parts: Parts, required: Requirements, machine: Machine) -> Dispatcher:
    collective = Collective.over(parts.cpu_group)
    # Compiling takes minutes; `vllm-commext tune` does it, and vLLM's fusion pass.
    compiled = all(collective.run(is_compiled))
    measurable = peers.measurable(machine.link != NO_ACCESS)
    wanted = [name for name in measurable if compiled or name not in names.FLASHINFER]
    dispatcher = create_dispatcher(parts, None, wanted=wanted)
    facts = required.facts
    options = Options(
        STARTUP_SIZES, (facts.dtype,), facts.hidden, samples=5, seconds=STARTUP_SECONDS
    )
    context = parts.custom.capture if parts.custom is not None else nullcontext
    times = measure.measure_backends(dispatcher, collective, options, context)
    table = tuning.build_table(times, collective.world_size, "measured at start")
    dispatcher.use_table(table)
    measure.give_back_memory()
    if collective.rank == 0:
        try:
            cache.save(machine, table, facts.hidden)
        except OSError as error:
            logger.warning("commext: allreduce: the table was not kept: %s", error)
    return dispatcher


def lines(dispatcher: Dispatcher, required: Requirements) -> list[str]:
    """What the log says of it: the backends, and which of them serves which sizes."""
    made = ", ".join(dispatcher.backends)
    if required.only is not None:
        why = "forced" if required.forced else "all that VLLM_BATCH_INVARIANT allows"
        return [f"{required.only} is {why}; made on all ranks: {made}"]
    if required.by_itself:
        return [f"takes part by itself: {'; '.join(describe(dispatcher.table))}"]
    return [f"made on all ranks: {made}", *describe(dispatcher.table)]
