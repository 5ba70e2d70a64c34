"""What can be known to fail before engines start."""

import importlib.util
import socket
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

from vllm_commext.errors import ConfigError
from vllm_commext.serve.plan import LOOPBACK, Request
from vllm_commext.settings import INSTALL_NIXL

SMI_SECONDS = 20.0
USED_SHARE = 0.1
"""Of a GPU's memory: one that has more in use belongs to another."""
NEEDED = {
    "vllm": "pip install vllm==0.33.0",
    "nixl": INSTALL_NIXL,
    "aiohttp": 'pip install "vllm_commext[proxy]"',
}


def gpus_here() -> dict[str, tuple[float, float]]:
    """GPUs by number, each with the MiB in use and in all; none where there is no driver."""
    query = "--query-gpu=index,memory.used,memory.total"
    try:
        listed = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=SMI_SECONDS,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[part.strip() for part in line.split(",")] for line in listed.splitlines()]
    return {row[0]: (float(row[1]), float(row[2])) for row in rows if len(row) == 3}


def check(request: Request, here: dict[str, tuple[float, float]]) -> None:
    """Raise `ConfigError` with the remedy for the first thing that would fail."""
    for name, remedy in NEEDED.items():
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"expected the package {name}, got none here: {remedy}")
    _check_model(request.model)
    _check_gpus(request.gpus, here)
    _check_port(request.host, request.port)


def _check_model(model: str) -> None:
    is_path = model.startswith(("/", "./", "../", "~"))
    if is_path and not (Path(model).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"{model}: expected a folder with a model's config.json, got none; give the model's "
            "folder, or its name on a hub"
        )


def _check_gpus(gpus: Sequence[str], here: dict[str, tuple[float, float]]) -> None:
    for gpu in gpus:
        if gpu not in here:
            raise ConfigError(
                f"--gpus {','.join(gpus)}: expected GPUs of this host "
                f"({', '.join(here) or 'none: use --engines'}), got {gpu}; see nvidia-smi -L"
            )
        used, total = here[gpu]
        if used > USED_SHARE * total:
            raise ConfigError(
                f"--gpus {','.join(gpus)}: expected GPUs that are free, got {gpu} with "
                f"{used / 1024:.0f} of {total / 1024:.0f} GiB in use; see nvidia-smi"
            )


def _check_port(host: str, port: int) -> None:
    if reason := why_not_bound(host, port):
        raise ConfigError(
            f"--host {host} --port {port}: expected an address that can be listened on, got "
            f"{reason!r}; give another --port"
        )


def why_not_bound(host: str, port: int) -> str:
    """Reason why nothing can listen there; empty where something can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do, so that a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def free_ports() -> Generator[int]:
    """Ports of the loopback address that are free now; each once."""
    with ExitStack() as held:
        while True:
            one = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            one.bind((LOOPBACK, 0))
            yield one.getsockname()[1]
