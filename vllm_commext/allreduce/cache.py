"""Tables that were measured here, in the user's cache folder, those that are built in, and the
choice of the one that serves.

There is one file for a machine, a world size and the elements of a row, with a table of every dtype
that was measured."""

import functools
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_commext import private_files
from vllm_commext.allreduce import limits
from vllm_commext.allreduce.machine import NO_ACCESS, Machine, carried_over, digest
from vllm_commext.allreduce.table import Row, Table, decode
from vllm_commext.errors import ConfigError

HIDDEN = 8192  # elements of a row, where not given
ORIGIN = "built in"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
IN_ENGINES = frozenset({(H100, 2)})
"""GPUs and how many, on which an engine with our kernels was faster in all that was measured.  With
two H200s it was not at one request."""
KIB, MIB = 1 << 10, 1 << 20


class Thresholds(NamedTuple):
    """Message sizes in bytes at which the ranking of bfloat16 changes on one kind of machine."""

    flashinfer_first: int  # up to here FlashInfer's one-shot kernel is faster than `push`
    flashinfer_second: int  # up to here it is faster than NCCL
    fused_dtypes: tuple[str, ...] = ()  # in which our launch with the norm was measured; it led
    fused_last: int = 64 * MIB  # the largest message so measured


LAST = 64 * MIB  # the largest message that was measured without the norm
# Without multicast, in CUDA graphs of 32 chained calls, torch 2.11, vLLM 0.32, FlashInfer 0.7: on
# H200s by `allreduce.py` and `fused_norm.py` of the benchmarks, on H100s by `vllm-commext tune`.
BUILTIN = {
    (H200, 2): Thresholds(1278228, 8 * MIB, ("bfloat16", "float16", "float32"), 128 * MIB),
    (H200, 4): Thresholds(256 * KIB, 2 * MIB),
    (H100, 2): Thresholds(0, 8 * MIB, ("bfloat16",)),
}


class Entry(msgspec.Struct, frozen=True):
    """Content of a file: the table, and the machine in full, for the digest could collide."""

    machine: Machine
    hidden: int
    table: msgspec.Raw


def path_of(machine: Machine, world_size: int, hidden: int = HIDDEN) -> Path | None:
    """Return the file in the user's cache folder; None where the user has none."""
    where = private_files.cache_folder("allreduce")
    name = f"tp{world_size}_{hidden}_{digest(machine, world_size)}.json"
    return None if where is None else where / name


def _read(path: Path | None, hidden: int, world_size: int) -> tuple[Machine, Table] | None:
    content = None if path is None else private_files.read(path)
    if content is None:
        return None
    try:
        entry = msgspec.json.decode(content, type=Entry)
        table = decode(bytes(entry.table))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError):
        return None
    fits = (entry.hidden, table.world_size) == (hidden, world_size)
    return (entry.machine, table) if fits else None


def load(machine: Machine, world_size: int, hidden: int = HIDDEN) -> Table | None:
    """Read what was measured on that machine and still holds; None, too, of a damaged file."""
    found = _read(path_of(machine, world_size, hidden), hidden, world_size)
    if found is None or not found[0].is_like(machine):
        return None
    return carried_over(found[1], found[0], machine)


def save(machine: Machine, table: Table, hidden: int = HIDDEN) -> Path:
    """Write the table and return the file. OSError where the folder cannot be written.

    Dtypes that the table does not have keep what was measured of them with the same libraries."""
    path = path_of(machine, table.world_size, hidden)
    if path is None:
        raise FileNotFoundError("there is no cache folder: set HOME or XDG_CACHE_HOME")
    found = _read(path, hidden, table.world_size)
    if found is not None and found[0] == machine:
        before = found[1]
        rows, fused = {**before.rows, **table.rows}, {**before.fused, **table.fused}
        table = Table(table.world_size, rows, table.origin, fused)
    content = msgspec.json.encode(Entry(machine, hidden, msgspec.Raw(msgspec.json.encode(table))))
    private_files.write(path, content)
    return path


@functools.cache
def builtin_table(gpu: str, world_size: int) -> Table | None:
    known = BUILTIN.get((gpu, world_size))
    if known is None:
        return None
    flashinfer, ours = limits.FLASHINFER_ONE_SHOT, (limits.PUSH,)
    rows = (
        Row(known.flashinfer_first, (flashinfer, *ours, limits.NCCL)),
        Row(known.flashinfer_second, (*ours, flashinfer, limits.NCCL)),
        Row(LAST, (*ours, limits.NCCL)),
    )
    fused = (Row(known.fused_last, (limits.FUSED_PUSH, limits.UNFUSED)),)
    return Table(
        world_size,
        {"bfloat16": rows[0 if known.flashinfer_first else 1 :]},
        f"{ORIGIN}, {world_size} x {gpu}",
        dict.fromkeys(known.fused_dtypes, fused),
    )


def find_table(
    machine: Machine,
    world_size: int,
    hidden: int = HIDDEN,
    *,
    use_cache: bool = True,
    in_engines: bool = False,
) -> Table | None:
    """Return what was measured on this machine with such rows, else what is built in, else None;
    always None without peer access.

    Where the one says nothing of fused norms, the other does. *in_engines*: nothing built in for
    GPUs on which engines were not shown to gain."""
    if machine.link == NO_ACCESS:
        return None
    measured = load(machine, world_size, hidden) if use_cache else None
    serves = not in_engines or (machine.gpu, world_size) in IN_ENGINES
    known = builtin_table(machine.gpu, world_size) if serves else None
    if measured is None or measured.fused or known is None:
        return measured or known
    return msgspec.structs.replace(measured, fused=known.fused)
