"""Checks of RDMA: NICs and their ports, the device files, memory that may be locked, GPUDirect.

Nothing where the machine has no RDMA device.
"""

import fnmatch
import os
import platform
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_commext.cli.report import Found, Level, Row

DEVICES_VARIABLE = "UCX_NET_DEVICES"
CAP_IPC_LOCK = 14
"""Bit of the capability that lifts the limit of locked memory."""
DMABUF_KERNEL = (5, 12)
OPEN_MODULES = "Open Kernel Module"
ROOT = Path("/")


class Port(NamedTuple):
    """A port of an RDMA device, as UCX names it (``mlx5_0:1``), and what the kernel says of it."""

    name: str
    state: str
    link_layer: str
    rate: str

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def rdma_ports(root: Path = ROOT) -> list[Port]:
    return [
        Port(
            f"{folder.parent.parent.name}:{folder.name}",
            _read(folder / "state").rpartition(":")[2].strip(),
            _read(folder / "link_layer"),
            _read(folder / "rate"),
        )
        for folder in sorted(root.glob("sys/class/infiniband/*/ports/*"))
    ]


def named_devices(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Iterable[Found]:
    """Devices of `DEVICES_VARIABLE` that are not there."""
    there = [port.name for port in rdma_ports(root)] + sorted(os.listdir(root / "sys/class/net"))
    named = environ.get(DEVICES_VARIABLE, "")
    wanted = [name for name in named.split(",") if name and not named.startswith("^")]
    missing = [name for name in wanted if name != "all" and not fnmatch.filter(there, name)]
    if missing:
        remedy = f"unset it, or name some of: {', '.join(there)}"
        value = f"{', '.join(missing)} is not there"
        yield Found(value, Level.ERROR, DEVICES_VARIABLE, remedy)


def ports(root: Path = ROOT) -> Iterable[Found]:
    found = rdma_ports(root)
    has_active = any(port.is_active for port in found)
    for port in found:
        level = Level.OK if port.is_active else Level.INFO if has_active else Level.WARNING
        value = f"{port.state}, {port.link_layer}, {port.rate}"
        yield Found(value, level, f"RDMA {port.name}", "" if has_active else None)


def device_files(root: Path = ROOT) -> Iterable[Found]:
    if rdma_ports(root) and not any(root.glob("dev/infiniband/uverbs*")):
        yield Found("no uverbs device", Level.WARNING)


def locked_memory(root: Path = ROOT) -> Iterable[Found]:
    if rdma_ports(root):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        lines = _read(root / "proc/self/status").splitlines()
        held = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
        yield lockable(limit, any(bits >> CAP_IPC_LOCK & 1 for bits in held))


def lockable(limit: int, has_capability: bool) -> Found:
    if limit == resource.RLIM_INFINITY:
        return Found("unlimited")
    if has_capability:
        return Found("no limit with CAP_IPC_LOCK")
    return Found(f"{limit / 2**20:.0f} MiB", Level.WARNING)


def gpu_direct(root: Path = ROOT) -> Iterable[Found]:
    driver_text = _read(root / "proc/driver/nvidia/version")
    if not driver_text or not rdma_ports(root):
        return
    kernel = tuple(int(part) for part in platform.release().split(".")[:2])
    if (root / "sys/module/nvidia_peermem").exists():
        yield Found("nvidia_peermem is loaded")
    elif OPEN_MODULES in driver_text and kernel >= DMABUF_KERNEL:
        yield Found("nvidia_peermem is not loaded; kernel and driver have dma-buf")
    else:
        value = "neither nvidia_peermem nor dma-buf: NICs do not reach GPU memory"
        yield Found(value, Level.WARNING)


ROWS = (
    Row("machine", DEVICES_VARIABLE, named_devices),
    Row(
        "machine", "", ports, "InfiniBand: cable and subnet manager; RoCE: `ip link set DEVICE up`"
    ),
    Row(
        *("machine", "/dev/infiniband", device_files),
        "in a container: --device /dev/infiniband; Kubernetes: the fabric's resource",
    ),
    Row(
        *("machine", "lockable memory", locked_memory),
        "registration with a NIC fails beyond it: `ulimit -l unlimited`; container: --ulimit "
        "memlock=-1 or --cap-add IPC_LOCK; systemd: LimitMEMLOCK=infinity",
    ),
    Row(
        *("machine", "GPUDirect RDMA", gpu_direct),
        "`modprobe nvidia_peermem`, or NVIDIA's open kernel modules on Linux 5.12 or newer; "
        '"host_copy": true reads through host memory instead',
    ),
)
