"""Which table serves, and how it reads."""

import os
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vllm_commext.allreduce.table import builtin, cache
from vllm_commext.allreduce.table.machine import NO_ACCESS, Machine
from vllm_commext.allreduce.table.table import Row, Table

UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def find_table(
    machine: Machine,
    world_size: int,
    hidden: int = cache.HIDDEN,
    *,
    use_cache: bool = True,
    in_engines: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Table | None:
    """What was measured on this machine with such rows, else what is built in for it, else None.

    Where the one says nothing of fused norms, the other does.  *in_engines*: nothing built in for
    GPUs on which engines were not shown to gain.
    """
    measured = cache.load(machine, world_size, hidden, environ) if use_cache else None
    reaches = machine.link != NO_ACCESS
    serves = reaches and (not in_engines or (machine.gpu, world_size) in builtin.IN_ENGINES)
    known = builtin.builtin_table(machine.gpu, world_size) if serves else None
    if measured is None or measured.fused or known is None:
        return measured or known
    return msgspec.structs.replace(measured, fused=known.fused)


def size_text(num_bytes: int) -> str:
    """``512 KiB``, ``7.5 MiB``, ``100 B``."""
    for unit, name in UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def _leaders(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Who comes first, and up to which size."""
    leaders: list[tuple[str, int]] = []
    for row in rows:
        if leaders and leaders[-1][0] == row.ranking[0]:
            leaders.pop()
        leaders.append((row.ranking[0], row.max_bytes))
    return leaders


def describe(table: Table | None) -> Iterator[str]:
    """A line a dtype: which backend comes first up to which size."""
    if table is None:
        yield "no table for this machine; vLLM's default dispatch serves"
        return
    for dtype, rows in table.rows.items():
        parts = (f"{name} up to {size_text(bound)}" for name, bound in _leaders(rows))
        yield f"{dtype}: {', '.join(parts)}, then vLLM's default dispatch ({table.origin})"
    for dtype, rows in table.fused.items():
        parts = (f"{name} up to {size_text(bound)}" for name, bound in _leaders(rows))
        yield f"{dtype}, with residual and norm: {', '.join(parts)}"
