"""What a measurement holds for: the machine and the kernels that it was made with."""

import functools
import hashlib

import msgspec

from vllm_commext.allreduce import names
from vllm_commext.allreduce.table.table import Row, Table
from vllm_commext.gpu.nvrtc import SOURCES

NO_ACCESS = "no peer access"  # instead of how GPUs are joined, where nothing can go over it
# A library's minor release may bring other kernels: what was measured of its own is void then.
COLUMNS = {
    "flashinfer": (*names.FLASHINFER, names.FUSED_FLASHINFER),
    "nccl": (names.NCCL,),
}
MEASURED_WITH = ("vllm", "torch", "nccl", "flashinfer", "driver")


@functools.cache
def own_kernels() -> str:
    """Digest of the sources of this package's kernels."""
    files = sorted(path for path in SOURCES.iterdir() if path.is_file())
    text = b"".join(path.name.encode() + path.read_bytes() for path in files)
    return hashlib.sha256(text).hexdigest()[:16]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All on which the speed of an all-reduce depends.

    Attributes:
        gpu: the GPU's name, as the driver gives it.
        link: how the GPUs are joined, such as ``NV18`` for every pair, ``unknown``, or `NO_ACCESS`.
        driver: the driver's version; `torch`, `nccl`, `flashinfer` and `vllm` likewise, empty
            where there is none. Other versions leave a measurement of the kernels as it is.
        multicast: whether NVLink multicast was allowed.
        kernels: `own_kernels`.
    """

    gpu: str
    link: str
    driver: str
    torch: str
    nccl: str
    flashinfer: str
    vllm: str
    multicast: bool = False
    kernels: str = msgspec.field(default_factory=own_kernels)

    def is_like(self, other: "Machine") -> bool:
        """Whether all but the libraries is the same."""
        return _hard(self) == _hard(other)


def _hard(machine: Machine) -> tuple[str, str, bool, str]:
    return machine.gpu, machine.link, machine.multicast, machine.kernels


def digest(machine: Machine, world_size: int) -> str:
    """Sixteen hexadecimal digits that name the machine, whatever its libraries, and a number of its
    GPUs."""
    text = msgspec.json.encode([*_hard(machine), world_size])
    return hashlib.sha256(text).hexdigest()[:16]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def carried_over(table: Table, then: Machine, now: Machine) -> Table:
    """What of a table still holds: not the columns of a library of another minor release. Where no
    other is left, vLLM's own way is taken."""
    void = {
        name
        for library, columns in COLUMNS.items()
        if _minor(getattr(then, library)) != _minor(getattr(now, library))
        for name in columns
    }

    def kept(of: dict[str, tuple[Row, ...]], rest: str) -> dict[str, tuple[Row, ...]]:
        return {
            dtype: tuple(
                Row(row.max_bytes, tuple(n for n in row.ranking if n not in void) or (rest,))
                for row in rows
            )
            for dtype, rows in of.items()
        }

    before = ", ".join(
        f"{name} {getattr(then, name)}"
        for name in MEASURED_WITH
        if getattr(then, name) != getattr(now, name)
    )
    origin = f"{table.origin}, with {before}" if before else table.origin
    rows, fused = kept(table.rows, names.VLLM), kept(table.fused, names.UNFUSED)
    return Table(table.world_size, rows, origin, fused)
