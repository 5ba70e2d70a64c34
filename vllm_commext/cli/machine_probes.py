"""Probes of the machine: NIXL's plug-ins, the driver, GPUs and all-reduces between them, shared
memory, ports."""

import logging
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vllm_commext.allreduce import multicast
from vllm_commext.allreduce.table.cache import find_table
from vllm_commext.allreduce.table.machine import Machine
from vllm_commext.allreduce.table.table import Table, describe
from vllm_commext.cli.report import Check, Level

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
    """Processors that this process may use, and how much memory it may lock."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB"
    value = f"{len(os.sched_getaffinity(0))} usable; lockable memory {limit}"
    return Check("machine", "processors", value)


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
