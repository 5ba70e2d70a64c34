"""What `vllm-commext doctor` says of RDMA: NICs and their ports, the device files, memory that may
be locked, GPUDirect.  Nothing where the machine has no RDMA device.
"""

import fnmatch
import os
import platform
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_commext.cli.report import Check, Level

DEVICES_VARIABLE = "UCX_NET_DEVICES"
CAP_IPC_LOCK = 14
"""Bit of the capability that lifts the limit of locked memory."""
DMABUF_KERNEL = (5, 12)
OPEN_MODULES = "Open Kernel Module"


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device, as UCX names it (``mlx5_0:1``), and what the kernel says of it."""

    name: str
    state: str
    link_layer: str
    rate: str

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


def rdma_ports(root: Path = Path("/")) -> list[Port]:
    """All ports of all RDMA devices, by name."""
    folders = sorted(root.glob("sys/class/infiniband/*/ports/*"))
    return [
        Port(
            f"{folder.parent.parent.name}:{folder.name}",
            _read(folder / "state").rpartition(":")[2].strip(),
            _read(folder / "link_layer"),
            _read(folder / "rate"),
        )
        for folder in folders
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def fabric(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Iterable[Check]:
    """RDMA as this process would use it."""
    ports = rdma_ports(root)
    yield from named_devices(environ, root)
    if not ports:
        return
    has_active = any(port.is_active for port in ports)
    for port in ports:
        value = f"{port.state}, {port.link_layer}, {port.rate}"
        hint = "InfiniBand: cable and subnet manager; RoCE: `ip link set DEVICE up`"
        level = Level.OK if port.is_active else Level.INFO if has_active else Level.WARNING
        yield Check("machine", f"RDMA {port.name}", value, level, "" if has_active else hint)
    if not any(root.glob("dev/infiniband/uverbs*")):
        hint = "in a container: --device /dev/infiniband; Kubernetes: the fabric's resource"
        yield Check("machine", "/dev/infiniband", "no uverbs device", Level.WARNING, hint)
    yield lockable(*resource.getrlimit(resource.RLIMIT_MEMLOCK)[:1], _may_lock(root))
    yield from _gpu_direct(root)


def named_devices(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Iterable[Check]:
    """The devices that UCX is told to use, where one of them is not there."""
    there = [port.name for port in rdma_ports(root)] + sorted(os.listdir(root / "sys/class/net"))
    named = environ.get(DEVICES_VARIABLE, "")
    wanted = [name for name in named.split(",") if name and not named.startswith("^")]
    missing = [name for name in wanted if name != "all" and not fnmatch.filter(there, name)]
    if missing:
        hint = f"unset it, or name some of: {', '.join(there)}"
        value = f"{', '.join(missing)} is not there"
        yield Check("machine", DEVICES_VARIABLE, value, Level.ERROR, hint)


def _may_lock(root: Path) -> bool:
    """Whether this process has the capability to lock memory without a limit."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def lockable(limit: int, has_capability: bool) -> Check:
    """How much memory may be locked, as each registration with an RDMA device does."""
    if limit == resource.RLIM_INFINITY or has_capability:
        value = "unlimited" if limit == resource.RLIM_INFINITY else "no limit with CAP_IPC_LOCK"
        return Check("machine", "lockable memory", value, Level.OK)
    hint = (
        "registration with a NIC fails beyond it: `ulimit -l unlimited`; container: --ulimit "
        "memlock=-1 or --cap-add IPC_LOCK; systemd: LimitMEMLOCK=infinity"
    )
    value = f"{limit / 2**20:.0f} MiB"
    return Check("machine", "lockable memory", value, Level.WARNING, hint)


def _gpu_direct(root: Path) -> Iterable[Check]:
    """By which way NICs reach GPU memory; nothing without a driver of NVIDIA's."""
    driver = _read(root / "proc/driver/nvidia/version")
    if not driver:
        return
    if (root / "sys/module/nvidia_peermem").exists():
        yield Check("machine", "GPUDirect RDMA", "nvidia_peermem is loaded", Level.OK)
        return
    kernel = tuple(int(part) for part in platform.release().split(".")[:2])
    if OPEN_MODULES in driver and kernel >= DMABUF_KERNEL:
        value = "nvidia_peermem is not loaded; kernel and driver have dma-buf"
        yield Check("machine", "GPUDirect RDMA", value, Level.OK)
        return
    hint = (
        "`modprobe nvidia_peermem`, or NVIDIA's open kernel modules on Linux 5.12 or newer; "
        '"host_copy": true reads through host memory instead'
    )
    value = "neither nvidia_peermem nor dma-buf: NICs do not reach GPU memory"
    yield Check("machine", "GPUDirect RDMA", value, Level.WARNING, hint)
