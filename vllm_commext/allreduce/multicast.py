"""Keeps libraries off NVLink multicast, which nothing of ours uses.

Creating a multicast object can put a host's GPUs out of service for everybody who shares them.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping

TORCH = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# FLASHINFER_CONFIDENTIAL_COMPUTE is left alone, for it also changes how FlashInfer shares its
# workspace; ours asks for `trtllm` by name, which has no multicast.
IN_VLLM: Mapping[str, str] = {  # which together keep vLLM's collectives from it
    "NCCL_NVLS_ENABLE": "0",
    TORCH: "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
DEFAULTS: Mapping[str, str] = {**IN_VLLM, "NVSHMEM_DISABLE_NVLS": "1"}


def keep_off(environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Set what vLLM, torch and NCCL read; a value that is there stays. Returns the names set."""
    missing = [name for name in DEFAULTS if name not in environ]
    environ.update({name: DEFAULTS[name] for name in missing})
    return tuple(missing)


@contextlib.contextmanager
def torch_guard(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Keep multicast off in a rendezvous of torch's symmetric memory, which reads its switch each
    time."""
    before = environ.get(TORCH)
    environ[TORCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del environ[TORCH]
        else:
            environ[TORCH] = before
