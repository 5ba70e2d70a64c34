"""Tables that were measured here, in the user's cache folder: one file a machine and world size."""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_commext.allreduce import table as tables
from vllm_commext.allreduce.machine import Machine, digest
from vllm_commext.allreduce.table import Table
from vllm_commext.errors import ConfigError


class Entry(msgspec.Struct, frozen=True):
    """What a file holds: the table, and the machine in full, for the digest could collide."""

    machine: Machine
    table: msgspec.Raw


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the files are: the XDG cache folder, else the one in the home folder."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vllm_commext" / "allreduce"


def path_of(machine: Machine, world_size: int, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of that machine and world size."""
    return folder(environ) / f"tp{world_size}_{digest(machine, world_size)}.json"


def load(
    machine: Machine, world_size: int, environ: Mapping[str, str] = os.environ
) -> Table | None:
    """The table that was measured on that machine, or None; one that cannot be read is none."""
    path = path_of(machine, world_size, environ)
    try:
        entry = msgspec.json.decode(path.read_bytes(), type=Entry)
        table = tables.decode(bytes(entry.table))
    except (OSError, msgspec.DecodeError, ConfigError):
        return None
    matches = entry.machine == machine and table.world_size == world_size
    return table if matches else None


def save(machine: Machine, table: Table, environ: Mapping[str, str] = os.environ) -> Path:
    """Write the table, whole or not at all; returns the file.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path_of(machine, table.world_size, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode(Entry(machine, msgspec.Raw(tables.encode(table))))
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
