"""Tables that were measured here, in the user's cache folder, those that are built in, and the
choice of the one that serves.

There is one file for a machine, a world size and the elements of a row, with a table of every dtype
that was measured.  What is built in was measured on H200s and H100s without multicast, in CUDA
graphs of 32 chained calls, on torch 2.11, vLLM 0.32 and FlashInfer 0.7: on H200s by
``benchmarks/allreduce.py`` (2026-11-22) and ``benchmarks/fused_norm.py`` (2026-11-23), on H100s by
``vllm-commext tune allreduce`` (2026-11-24).
"""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_commext import private_files
from vllm_commext.allreduce.table.machine import NO_ACCESS, Machine, carried_over, digest
from vllm_commext.allreduce.table.table import Table, build_rows, build_table, decode, encode
from vllm_commext.errors import ConfigError

HIDDEN = 8192  # elements of a row, where nobody says how many
BUILTIN = Path(__file__).with_name("builtin.json")
ORIGIN = "built in"
IN_ENGINES = frozenset({("NVIDIA H100 80GB HBM3", 2)})
"""GPUs and how many, on which an engine with our kernels was faster in all that was measured.  With
two H200s it was not at one request."""


class Measured(msgspec.Struct, frozen=True):
    """Entry of `BUILTIN`: by dtype, bytes of a message and backend the microseconds of a call, on
    the slowest rank.

    Attributes:
        gpu: its name, as the driver gives it.
        world_size: how many of them.
        times: of the backends that come first or second somewhere, and of NCCL.
        fused: with residual and norm, where these were measured apart.
    """

    gpu: str
    world_size: int
    times: dict[str, dict[int, dict[str, float]]]
    fused: dict[str, dict[int, dict[str, float]]]


class Entry(msgspec.Struct, frozen=True):
    """Content of a file: the table, and the machine in full, for the digest could collide."""

    machine: Machine
    hidden: int
    table: msgspec.Raw


def folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Folder of the files: the XDG cache folder, else the one in the home folder; None without."""
    return private_files.cache_folder("allreduce", environ)


def path_of(
    machine: Machine, world_size: int, hidden: int = HIDDEN, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """The file of that machine, world size and row; None where there is no folder."""
    where = folder(environ)
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


def load(
    machine: Machine, world_size: int, hidden: int = HIDDEN, environ: Mapping[str, str] = os.environ
) -> Table | None:
    """Read what was measured on that machine and still holds, or None; a file that cannot be read
    is none."""
    found = _read(path_of(machine, world_size, hidden, environ), hidden, world_size)
    if found is None or not found[0].is_like(machine):
        return None
    return carried_over(found[1], found[0], machine)


def save(
    machine: Machine, table: Table, hidden: int = HIDDEN, environ: Mapping[str, str] = os.environ
) -> Path:
    """Write the table, whole or not at all, and return the file.

    Dtypes that the table does not have keep what was measured of them with the same libraries.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path_of(machine, table.world_size, hidden, environ)
    if path is None:
        raise FileNotFoundError("there is no cache folder: set HOME or XDG_CACHE_HOME")
    found = _read(path, hidden, table.world_size)
    if found is not None and found[0] == machine:
        before = found[1]
        rows, fused = {**before.rows, **table.rows}, {**before.fused, **table.fused}
        table = Table(table.world_size, rows, table.origin, fused)
    content = msgspec.json.encode(Entry(machine, hidden, msgspec.Raw(encode(table))))
    private_files.write(path, content)
    return path


@functools.cache
def builtin_table(gpu: str, world_size: int) -> Table | None:
    """The table of that many GPUs of that name, or None where none was measured."""
    for found in msgspec.json.decode(BUILTIN.read_bytes(), type=list[Measured]):
        if (found.gpu, found.world_size) == (gpu, world_size):
            table = build_table(found.times, world_size, f"{ORIGIN}, {world_size} x {gpu}")
            fused = {dtype: build_rows(times) for dtype, times in found.fused.items()}
            return msgspec.structs.replace(table, fused={**table.fused, **fused})
    return None


def find_table(
    machine: Machine,
    world_size: int,
    hidden: int = HIDDEN,
    *,
    use_cache: bool = True,
    in_engines: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Table | None:
    """Return what was measured on this machine with such rows, else what is built in, else None.

    Where the one says nothing of fused norms, the other does. *in_engines*: nothing built in for
    GPUs on which engines were not shown to gain.
    """
    measured = load(machine, world_size, hidden, environ) if use_cache else None
    reaches = machine.link != NO_ACCESS
    serves = reaches and (not in_engines or (machine.gpu, world_size) in IN_ENGINES)
    known = builtin_table(machine.gpu, world_size) if serves else None
    if measured is None or measured.fused or known is None:
        return measured or known
    return msgspec.structs.replace(measured, fused=known.fused)
