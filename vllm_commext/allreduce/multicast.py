"""NVLink multicast: off, unless the user allows it and nothing else switches it off.

Creating a multicast object can put a host's GPUs out of service for everybody who shares them.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping

TOGGLE = "VLLM_COMMEXT_ALLOW_MULTICAST"
TORCH = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# Each switches multicast off in one library, and with any of them set it stays off here too.
SWITCHES: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    TORCH: "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "FLASHINFER_CONFIDENTIAL_COMPUTE": "1",
}
# What keeps vLLM, torch and NCCL from it. FlashInfer's last switch is left alone, for it also
# changes how its workspace is shared; ours asks for `trtllm` by name, which has no multicast.
DEFAULTS: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    TORCH: "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}


def switched_off_by(environ: Mapping[str, str] = os.environ) -> str:
    """Name what switches multicast off, as ``NAME=value``; empty where it is allowed."""
    if environ.get(TOGGLE) != "1":
        return f"{TOGGLE}={environ.get(TOGGLE, '0')}"
    found = (f"{name}={value}" for name, value in SWITCHES.items() if environ.get(name) == value)
    return next(found, "")


def is_allowed(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a multicast object may be created."""
    return not switched_off_by(environ)


def keep_off(environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Set, where multicast is not allowed, what the libraries read; a value that is there stays.

    Returns:
        The names that were set.
    """
    if is_allowed(environ):
        return ()
    missing = [name for name in DEFAULTS if name not in environ]
    environ.update({name: DEFAULTS[name] for name in missing})
    return tuple(missing)


@contextlib.contextmanager
def torch_guard(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Keep multicast off in a rendezvous of torch's symmetric memory, which reads its switch each
    time."""
    if is_allowed(environ):
        yield
        return
    before = environ.get(TORCH)
    environ[TORCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del environ[TORCH]
        else:
            environ[TORCH] = before
