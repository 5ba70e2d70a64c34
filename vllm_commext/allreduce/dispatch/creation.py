"""Creating a group's dispatcher: what all ranks have, and what they agree about."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_commext.allreduce import multicast, names
from vllm_commext.allreduce.backends import flashinfer, host, limits, push
from vllm_commext.allreduce.backends.backend import Backend, CustomBackend, NcclBackend
from vllm_commext.allreduce.backends.flashinfer_workspaces import MAX_MESSAGE_BYTES, is_compiled
from vllm_commext.allreduce.dispatch.dispatcher import Dispatcher
from vllm_commext.allreduce.table import builtin
from vllm_commext.allreduce.table.table import Table
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger("vllm.commext.allreduce")

OUR_KERNEL = "our own kernel"
HOST_MEMORY = "our own kernel for host memory"
OWN_STEPS = (OUR_KERNEL, HOST_MEMORY)  # makers that take them by themselves


@dataclass(frozen=True)
class Parts:
    """What a group has already.

    Attributes:
        cpu_group: sends objects without a GPU.
        device_group: NCCL's, for where vLLM's own binding has not found the library.
        device: this rank's GPU.
        custom: vLLM's custom all-reduce, or None where vLLM has none or has disabled it.
        pynccl: vLLM's binding of NCCL, or None.
    """

    cpu_group: "ProcessGroup"
    device_group: "ProcessGroup | None"
    device: "torch.device"
    custom: Any = None
    pynccl: Any = None


Maker = Callable[[], Sequence[Backend]]


def _flashinfer(
    parts: Parts, table: Table | None, family: Sequence[str], *, may_compile: bool
) -> Sequence[Backend]:
    if not may_compile and not is_compiled():
        raise UnsupportedError(
            "its kernels are not compiled, which takes minutes; `vllm-commext tune allreduce` "
            "compiles and measures them"
        )
    return flashinfer.make_backends(
        parts.cpu_group,
        parts.device,
        _largest(table, family, MAX_MESSAGE_BYTES),
        mnnvl=names.FLASHINFER_MNNVL in family,
    )


def _largest(table: Table | None, family: Sequence[str], otherwise: int) -> int:
    """The largest message for which one of the family comes first, in bytes."""
    if table is None:
        return otherwise
    led = (table.leads_up_to(dtype, tuple(family)) for dtype in table.rows)
    return min(max(led, default=0), otherwise)


def _makers(
    parts: Parts,
    collective: Collective,
    table: Table | None,
    wanted: Sequence[str],
    most_bytes: int,
) -> dict[str, Maker]:
    """How to make each family of backends that is wanted; in an order that all ranks share."""
    flash = (names.FLASHINFER_ONE_SHOT, names.FLASHINFER_TWO_SHOT)
    # Nobody who has not asked for FlashInfer is to wait for its compiler.
    may_compile = table is None or not table.origin.startswith(builtin.ORIGIN)
    makers: dict[str, Maker] = {}
    if parts.custom is not None and names.CUSTOM in wanted:
        makers["custom"] = lambda: [CustomBackend(parts.custom)]
    if set(flash).intersection(wanted):
        makers["FlashInfer"] = lambda: _flashinfer(parts, table, flash, may_compile=may_compile)
    if names.FLASHINFER_MNNVL in wanted:
        mnnvl = (names.FLASHINFER_MNNVL,)
        makers["FlashInfer's mnnvl"] = lambda: _flashinfer(
            parts, table, mnnvl, may_compile=may_compile
        )
    if names.PUSH in wanted and collective.world_size in limits.PUSH_WORLD_SIZES:
        # Larger messages go in parts, so what no message reaches need not be there.
        bound = min(push.MAX_MESSAGE_BYTES, most_bytes or push.MAX_MESSAGE_BYTES)
        led = _largest(table, (names.PUSH,), bound)
        fused = table.leads_fused(names.FUSED_PUSH) if table is not None else 0
        num_bytes = max(led, min(fused, bound))
        makers[OUR_KERNEL] = lambda: [push.PushBackend(num_bytes, collective)]
    if names.HOST in wanted and collective.world_size in limits.PUSH_WORLD_SIZES:
        shared_bytes = _largest(table, (names.HOST,), host.MAX_MESSAGE_BYTES)
        makers[HOST_MEMORY] = lambda: [host.HostBackend(shared_bytes, collective)]
    makers["NCCL"] = lambda: [NcclBackend(parts.pynccl, parts.device_group)]
    return makers


def _make_together(what: str, maker: Maker, collective: Collective) -> Sequence[Backend]:
    """The backends of one family, or none on any rank, with one line why."""
    made: list[Backend] = []
    try:
        if what in OWN_STEPS:
            made += maker()
        else:
            collective.agree(lambda: made.extend(maker()))
    except UnsupportedError as error:
        if collective.rank == 0:
            logger.warning("commext: allreduce: without %s on all ranks: %s", what, error)
        return []
    return made


@dataclass(frozen=True)
class _Required:
    """What one rank wants, and what it has; the first three must be the same on all ranks."""

    forced: str | None
    wanted: tuple[str, ...] | None
    multicast: bool
    has_custom: bool
    table: Table | None

    @property
    def settings(self) -> tuple[str | None, tuple[str, ...] | None, bool]:
        return self.forced, self.wanted, self.multicast


def create_dispatcher(
    parts: Parts,
    table: Table | None,
    forced: str | None = None,
    wanted: Sequence[str] | None = None,
    most_bytes: int = 0,
) -> Dispatcher:
    """The dispatcher of a group; collective, outside a capture.

    Args:
        parts: what the group has.
        table: what was measured; rank 0's serves all.
        forced: the one backend that the user wants, or None.
        wanted: backends to create, in order to measure them; None for those of the table.
        most_bytes: of the largest message that there will be, alike on all ranks; 0 where nobody
            knows.

    Raises:
        UnsupportedError: ranks differ in their settings, or one cannot take part; all raise it.
    """
    collective = Collective.over(parts.cpu_group)
    named = None if wanted is None else tuple(wanted)
    mine = _Required(forced, named, multicast.is_allowed(), parts.custom is not None, table)
    of_ranks = collective.run(lambda: mine)
    settings = [one.settings for one in of_ranks]
    if len(set(settings)) != 1:
        raise UnsupportedError(
            f"expected the same settings on all ranks, got {settings} (forced backend, "
            "backends to measure, multicast); set the toggles alike"
        )
    table = of_ranks[0].table
    without: set[str] = set()
    if not all(one.has_custom for one in of_ranks):
        without.add(names.CUSTOM)
    if not mine.multicast:
        without.add(names.FLASHINFER_MNNVL)
    chosen = wanted_backends(table, forced) if named is None else named
    chosen = [name for name in chosen if name not in without]
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
    `names.BACKENDS`; what they cannot take goes to NCCL.
    """
    rows = [row for of in table.rows.values() for row in of] if table else []
    ranked = {forced} if forced is not None else {row.ranking[0] for row in rows}
    if forced is None and table is not None and table.leads_fused(names.FUSED_PUSH):
        ranked.add(names.PUSH)  # whose memory the fused kernels use
    return tuple(name for name in names.BACKENDS if name in ranked)
