"""A group's dispatcher as an engine starts: from a table, or measured while it warms up."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from vllm_commext.allreduce import names, peers
from vllm_commext.allreduce.backends.flashinfer_workspaces import is_compiled
from vllm_commext.allreduce.dispatch.creation import Parts, create_dispatcher
from vllm_commext.allreduce.dispatch.dispatcher import Dispatcher
from vllm_commext.allreduce.lockstep import Lockstep
from vllm_commext.allreduce.table import cache, measure, tuning
from vllm_commext.allreduce.table.machine import NO_ACCESS, Machine
from vllm_commext.allreduce.table.measure import KIB, MIB, Options
from vllm_commext.allreduce.table.selection import describe, find_table
from vllm_commext.allreduce.table.table import Table
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu.ipc import host_identity

logger = logging.getLogger("vllm.commext.allreduce")

BUILT_IN, CACHED, STARTUP = "0", "cached", "startup"
STARTUP_SIZES = (8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
STARTUP_SECONDS = 8.0
IN_ORDER = (names.PUSH, names.HOST)  # they add in the order of ranks, whatever the size


@dataclass(frozen=True)
class Wishes:
    """What the user has set.

    Attributes:
        forced: the one backend to use, or None for the fastest.
        tune: `BUILT_IN`, `CACHED` or `STARTUP`.
        dtype: of the model, which is what is measured at start; hidden its rows' elements.
        eager: no CUDA graph spares the host what a call costs it, which is several times what
            vLLM's own takes, and more than the GPU gains.
        invariant: a row is to have the same bits whatever else is in the batch.
    """

    forced: str | None = None
    tune: str = CACHED
    dtype: str = "bfloat16"
    hidden: int = 8192
    eager: bool = False
    invariant: bool = False

    @property
    def only(self) -> str | None:
        """The one backend that may serve, or None for the fastest. One adds in one order; ours
        do for messages of any size, and a row's numbers do not depend on the others."""
        if self.invariant and self.forced not in IN_ORDER:
            return names.PUSH
        return self.forced


def why_none(hosts: Sequence[str], wishes: Wishes) -> str:
    """Why a group gets no dispatcher, from what its ranks agreed about; empty where it gets one.

    Args:
        hosts: of each rank, the running kernel's identity.
        wishes: the same on all ranks.
    """
    if len(set(hosts)) > 1:
        return f"its ranks are on {len(set(hosts))} hosts"
    if wishes.eager and wishes.forced is None:
        return "the engine is eager, and a call would cost the host more than the GPU gains"
    if wishes.invariant and wishes.forced not in (None, *IN_ORDER):
        return f"VLLM_BATCH_INVARIANT asks for one order of sums, for which {wishes.forced} is none"
    return ""


def start_dispatcher(
    parts: Parts, wishes: Wishes, read_machine: Callable[[], Machine]
) -> Dispatcher | None:
    """The group's dispatcher, or None where vLLM's default dispatch should serve; collective.

    Raises:
        UnsupportedError: the ranks cannot agree; all of them raise it.
    """
    lockstep = Lockstep(parts.cpu_group)
    facts = lockstep.run(lambda: (host_identity(), wishes))
    if len({theirs for _, theirs in facts}) > 1:
        raise UnsupportedError(
            f"expected the same settings on all ranks, got {[theirs for _, theirs in facts]}; set "
            "the toggles alike"
        )
    if reason := why_none([host for host, _ in facts], wishes):
        logger.info("commext: allreduce: vLLM's default dispatch serves: %s", reason)
        return None
    startup = wishes.tune == STARTUP and wishes.only is None

    def look() -> tuple[Machine, Table | None]:
        machine = read_machine()
        if startup:
            return machine, cache.load(machine, lockstep.world_size, wishes.hidden)
        return machine, find_table(
            *(machine, lockstep.world_size, wishes.hidden), use_cache=wishes.tune == CACHED
        )

    machine, table = lockstep.run(look)[0]
    if startup and table is None:
        return _measured(parts, wishes, machine)
    dispatcher = create_dispatcher(parts, table, wishes.only)
    if dispatcher.table is None and wishes.forced is None:
        reason = "this machine is not known"
    elif wishes.invariant and wishes.only not in dispatcher.backends:
        reason = "VLLM_BATCH_INVARIANT asks for one order of sums, and our kernel cannot be had"
    else:
        return dispatcher
    dispatcher.destroy()
    logger.info("commext: allreduce: vLLM's default dispatch serves: %s", reason)
    return None


def _measured(parts: Parts, wishes: Wishes, machine: Machine) -> Dispatcher:
    lockstep = Lockstep(parts.cpu_group)
    # Compiling takes minutes; `vllm-commext tune` does it, and vLLM's fusion pass.
    compiled = all(lockstep.run(is_compiled))
    measurable = peers.measurable(machine.link != NO_ACCESS)
    wanted = [name for name in measurable if compiled or name not in names.FLASHINFER]
    dispatcher = create_dispatcher(parts, None, wanted=wanted)
    options = Options(
        STARTUP_SIZES, (wishes.dtype,), wishes.hidden, samples=5, seconds=STARTUP_SECONDS
    )
    context = parts.custom.capture if parts.custom is not None else nullcontext
    times = measure.measure_backends(dispatcher, lockstep, options, context)
    table = tuning.build_table(times, lockstep.world_size, "measured at start")
    dispatcher.use_table(table)
    measure.give_back_memory()
    if lockstep.rank == 0:
        try:
            cache.save(machine, table, wishes.hidden)
        except OSError as error:
            logger.warning("commext: allreduce: the table was not kept: %s", error)
    return dispatcher


def lines(dispatcher: Dispatcher, forced: str | None) -> list[str]:
    """What the log says of it: the backends, and which of them serves which sizes."""
    made = ", ".join(dispatcher.backends)
    if forced is not None:
        return [f"{forced} is forced; made on all ranks: {made}"]
    return [f"made on all ranks: {made}", *describe(dispatcher.table)]
