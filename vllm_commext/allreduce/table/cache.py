"""Tables that were measured here, in the user's cache folder: one file for a machine, a world size
and the elements of a row, with a table of every dtype that was measured.
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_commext.allreduce.table import table as tables
from vllm_commext.allreduce.table.machine import Machine, digest
from vllm_commext.allreduce.table.table import Table
from vllm_commext.errors import ConfigError

HIDDEN = 8192  # elements of a row, where nobody says how many


class Entry(msgspec.Struct, frozen=True):
    """What a file holds: the table, and the machine in full, for the digest could collide."""

    machine: Machine
    hidden: int
    table: msgspec.Raw


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the files are: the XDG cache folder, else the one in the home folder."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vllm_commext" / "allreduce"


def path_of(
    machine: Machine, world_size: int, hidden: int = HIDDEN, environ: Mapping[str, str] = os.environ
) -> Path:
    """The file of that machine, world size and row."""
    return folder(environ) / f"tp{world_size}_{hidden}_{digest(machine, world_size)}.json"


def load(
    machine: Machine, world_size: int, hidden: int = HIDDEN, environ: Mapping[str, str] = os.environ
) -> Table | None:
    """The table that was measured on that machine, or None; one that cannot be read is none."""
    path = path_of(machine, world_size, hidden, environ)
    try:
        entry = msgspec.json.decode(path.read_bytes(), type=Entry)
        table = tables.decode(bytes(entry.table))
    except (OSError, msgspec.DecodeError, ConfigError):
        return None
    known = (entry.machine, entry.hidden, table.world_size)
    return table if known == (machine, hidden, world_size) else None


def save(
    machine: Machine, table: Table, hidden: int = HIDDEN, environ: Mapping[str, str] = os.environ
) -> Path:
    """Write the table, whole or not at all; returns the file.

    Dtypes that the table does not have keep what was measured of them before.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path_of(machine, table.world_size, hidden, environ)
    before = load(machine, table.world_size, hidden, environ)
    if before is not None:
        rows, fused = {**before.rows, **table.rows}, {**before.fused, **table.fused}
        table = Table(table.world_size, rows, table.origin, fused)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode(Entry(machine, hidden, msgspec.Raw(tables.encode(table))))
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    return path
