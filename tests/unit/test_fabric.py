"""What the doctor says of RDMA, over trees that look as /sys, /proc and /dev do."""

import resource
from functools import partial
from pathlib import Path

import pytest

from vllm_commext.cli import fabric
from vllm_commext.cli.fabric import lockable, rdma_ports
from vllm_commext.cli.report import Check, Level

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n"


def machine(root: Path, *, states: dict[str, str] | None = None, **files: str) -> Path:
    """A machine with one network device, and an RDMA port in each of these states."""
    (root / "sys/class/net/eth0").mkdir(parents=True)
    for name, state in (states or {}).items():
        device, port = name.split(":")
        folder = root / "sys/class/infiniband" / device / "ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"4: {state}\n")
        (folder / "link_layer").write_text("InfiniBand\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    for path, text in files.items():
        target = root / path.replace("__", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


def found(root: Path, devices: str = "") -> dict[str, Check]:
    environ = {fabric.DEVICES_VARIABLE: devices} if devices else {}
    rows = [row._replace(probe=partial(row.probe, root=root)) for row in fabric.ROWS]
    rows[0] = fabric.ROWS[0]._replace(probe=lambda: fabric.named_devices(environ, root))
    return {check.name: check for row in rows for check in row.checks()}


def test_a_machine_without_rdma_is_told_nothing(tmp_path: Path) -> None:
    assert found(machine(tmp_path)) == {}
    assert found(tmp_path, "eth0,all") == {}
    assert found(tmp_path, "^mlx5_7") == {}


def test_ports_and_their_state(tmp_path: Path) -> None:
    root = machine(tmp_path, states={"mlx5_0:1": "ACTIVE", "mlx5_1:1": "DOWN"})
    assert [(port.name, port.is_active) for port in rdma_ports(root)] == [
        ("mlx5_0:1", True),
        ("mlx5_1:1", False),
    ]
    checks = found(root)
    assert checks["RDMA mlx5_0:1"].value == "ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)"
    assert checks["RDMA mlx5_1:1"].level is Level.INFO  # the other one will do
    assert checks["/dev/infiniband"].level is Level.WARNING
    assert "GPUDirect RDMA" not in checks


def test_no_port_is_active(tmp_path: Path) -> None:
    root = machine(tmp_path, states={"mlx5_0:1": "INIT"}, dev__infiniband__uverbs0="")
    checks = found(root)
    assert checks["RDMA mlx5_0:1"].level is Level.WARNING
    assert "subnet manager" in checks["RDMA mlx5_0:1"].hint
    assert "/dev/infiniband" not in checks


@pytest.mark.parametrize("named", ["mlx5_7:1", "eth0,mlx5_7:1", "mlx5_[7-9]:1"])
def test_a_device_that_ucx_is_told_to_use_and_that_is_not_there(named: str, tmp_path: Path) -> None:
    root = machine(tmp_path, states={"mlx5_0:1": "ACTIVE"})
    check = found(root, named)["UCX_NET_DEVICES"]
    assert check.level is Level.ERROR
    assert check.value.startswith("mlx5_")
    assert "mlx5_0:1, eth0" in check.hint
    assert "UCX_NET_DEVICES" not in found(root, "mlx5_[0-3]:1,eth0")


@pytest.mark.parametrize(
    ("limit", "has_capability", "level"),
    [
        (resource.RLIM_INFINITY, False, Level.OK),
        (8 << 20, True, Level.OK),
        (8 << 20, False, Level.WARNING),
    ],
)
def test_memory_that_may_be_locked(limit: int, has_capability: bool, level: Level) -> None:
    check = lockable(limit, has_capability)
    assert check.level is level


@pytest.mark.parametrize(
    ("files", "level"),
    [
        ({"proc__driver__nvidia__version": CLOSED}, Level.WARNING),
        ({"proc__driver__nvidia__version": OPEN}, Level.OK),
        (
            {"proc__driver__nvidia__version": CLOSED, "sys__module__nvidia_peermem__refcnt": "0"},
            Level.OK,
        ),
    ],
)
def test_gpu_direct(files: dict[str, str], level: Level, tmp_path: Path) -> None:
    root = machine(tmp_path, states={"mlx5_0:1": "ACTIVE"}, **files)
    assert found(root)["GPUDirect RDMA"].level is level
