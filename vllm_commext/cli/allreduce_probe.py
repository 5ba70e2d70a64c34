"""What `vllm-commext doctor` says of the all-reduce: which backend serves which sizes here."""

from collections.abc import Callable, Iterable, Mapping

from vllm_commext.allreduce import multicast
from vllm_commext.allreduce.table import selection
from vllm_commext.allreduce.table.machine import Machine
from vllm_commext.allreduce.table.table import Table
from vllm_commext.cli.report import Check, Level

WORLD_SIZES = (2, 4, 8)
TUNE = "vllm-commext tune allreduce --tp {} measures it"


def tables(count: int, find: Callable[[int], Table | None]) -> Iterable[Check]:
    """For each world size that `count` GPUs allow, what `find` finds for it."""
    for world_size in (size for size in WORLD_SIZES if size <= count):
        table = find(world_size)
        value = "; ".join(selection.describe(table))
        hint = TUNE.format(world_size) if table is None else ""
        yield Check("gpu", f"all-reduce over {world_size} GPUs", value, Level.INFO, hint)


def multicast_state(environ: Mapping[str, str]) -> Check:
    """Whether NVLink multicast may be used, and what switches it off."""
    reason = multicast.switched_off_by(environ)
    return Check("gpu", "multicast", f"off: {reason}" if reason else "allowed", Level.INFO)


def probe(environ: Mapping[str, str]) -> Iterable[Check]:
    """The checks of this machine; torch is installed."""
    import torch

    from vllm_commext.allreduce.table.machine_facts import read_machine

    yield multicast_state(environ)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < WORLD_SIZES[0]:
        return
    machine: Machine = read_machine(torch.device("cuda", 0))
    yield from tables(count, lambda world_size: selection.find_table(machine, world_size))
