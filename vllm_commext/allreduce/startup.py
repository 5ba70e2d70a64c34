"""A group's dispatcher as an engine starts: from a table, or measured while it warms up."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from vllm_commext.allreduce import cache, measure, names, tuning
from vllm_commext.allreduce.creation import Parts, create_dispatcher
from vllm_commext.allreduce.dispatcher import Dispatcher
from vllm_commext.allreduce.flashinfer_workspaces import is_compiled
from vllm_commext.allreduce.lockstep import Lockstep
from vllm_commext.allreduce.machine import Machine
from vllm_commext.allreduce.measure import KIB, MIB, Options
from vllm_commext.allreduce.selection import describe, find_table
from vllm_commext.allreduce.table import Table

logger = logging.getLogger("vllm.commext.allreduce")

BUILT_IN, CACHED, STARTUP = "0", "cached", "startup"
STARTUP_SIZES = (8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
STARTUP_SECONDS = 8.0


@dataclass(frozen=True)
class Wishes:
    """What the user has set.

    Attributes:
        forced: the one backend to use, or None for the fastest.
        tune: `BUILT_IN`, `CACHED` or `STARTUP`.
        dtype: of the model, which is what is measured at start; hidden its rows' elements.
        eager: no CUDA graph spares the host what a call costs it. FlashInfer's Python takes 8 us
            (2 ranks) to 20 us (4) more than the other kernels' for each, and saves 2 us of the GPU.
    """

    forced: str | None = None
    tune: str = CACHED
    dtype: str = "bfloat16"
    hidden: int = 8192
    eager: bool = False

    def fitted(self, table: Table | None) -> Table | None:
        """What was measured in CUDA graphs, for an engine that may have none."""
        return table.without(names.FLASHINFER, "eager") if table and self.eager else table


def start_dispatcher(
    parts: Parts, wishes: Wishes, read_machine: Callable[[], Machine]
) -> Dispatcher | None:
    """The group's dispatcher, or None where nothing is known of this machine; collective.

    Raises:
        UnsupportedError: the ranks cannot agree; all of them raise it.
    """
    lockstep = Lockstep(parts.cpu_group)
    startup = wishes.tune == STARTUP and wishes.forced is None

    def look() -> tuple[Machine, Table | None]:
        machine = read_machine()
        if startup:
            return machine, wishes.fitted(cache.load(machine, lockstep.world_size))
        use_cache = wishes.tune == CACHED
        found = find_table(machine, lockstep.world_size, use_cache=use_cache)
        return machine, wishes.fitted(found)

    machine, table = lockstep.run(look)[0]
    if startup and table is None:
        return _measured(parts, wishes, machine)
    dispatcher = create_dispatcher(parts, table, wishes.forced)
    if dispatcher.table is None and wishes.forced is None:
        dispatcher.destroy()
        return None
    return dispatcher


def _measured(parts: Parts, wishes: Wishes, machine: Machine) -> Dispatcher:
    lockstep = Lockstep(parts.cpu_group)
    # Compiling takes minutes; `vllm-commext tune` does it, and vLLM's fusion pass.
    compiled = all(lockstep.run(is_compiled))
    wanted = [name for name in names.BACKENDS if compiled or name not in names.FLASHINFER]
    dispatcher = create_dispatcher(parts, None, wanted=wanted)
    options = Options(
        STARTUP_SIZES, (wishes.dtype,), wishes.hidden, samples=5, seconds=STARTUP_SECONDS
    )
    context = parts.custom.capture if parts.custom is not None else nullcontext
    times = measure.measure_backends(dispatcher, lockstep, options, context)
    table = tuning.build_table(times, lockstep.world_size, "measured at start")
    dispatcher.use_table(wishes.fitted(table) or table)
    measure.give_back_memory()
    if lockstep.rank == 0:
        try:
            cache.save(machine, table)
        except OSError as error:
            logger.warning("commext: allreduce: the table was not kept: %s", error)
    return dispatcher


def lines(dispatcher: Dispatcher, forced: str | None) -> list[str]:
    """What the log says of it: the backends, and which of them serves which sizes."""
    made = ", ".join(dispatcher.backends)
    if forced is not None:
        return [f"{forced} is forced; made on all ranks: {made}"]
    return [f"made on all ranks: {made}", *describe(dispatcher.table)]
