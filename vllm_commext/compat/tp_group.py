"""vLLM's tensor-parallel group in a process that serves no model: for tuning and measuring."""

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from vllm_commext.compat.monkey_patch import is_patched, patch
from vllm_commext.errors import UnsupportedError

NCCL_PATH = "VLLM_NCCL_SO_PATH"
NCCL_BINDING = "vllm.distributed.device_communicators.pynccl_wrapper"
NCCL_NAME = "libnccl.so.2"
SLEEP_FUNCTIONS = ("ncclCommSuspend", "ncclCommResume")


def find_nccl() -> str:
    """The NCCL library that came with torch, or an empty string.

    vLLM looks for it by name alone, which fails where the packages lie outside the loader's path.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for found in sorted(Path(folder).glob("*/lib/libnccl.so*")):
            return str(found)
    return ""


def help_vllm_find_nccl(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell vLLM where NCCL is, unless the user has."""
    path = find_nccl()
    if path and NCCL_PATH not in environ:
        environ[NCCL_PATH] = path


def let_vllm_use_nccl() -> tuple[str, ...]:
    """Make vLLM's own binding of NCCL work with a library that lacks what only sleep mode needs.

    vLLM otherwise does without its binding, and every sum through torch costs a copy more. Returns
    the functions that the library lacks.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    help_vllm_find_nccl()
    try:
        library = ctypes.CDLL(os.environ.get(NCCL_PATH) or NCCL_NAME)
    except OSError:
        return ()
    missing = tuple(name for name in SLEEP_FUNCTIONS if not hasattr(library, name))
    symbol = f"{NCCL_BINDING}:NCCLLibrary.exported_functions"
    known: list[Any] = NCCLLibrary.exported_functions
    kept = [function for function in known if function.name not in missing]
    if len(kept) < len(known) and not is_patched(symbol):
        patch({symbol: kept})
    return missing


@contextlib.contextmanager
def tensor_parallel(rank: int, world_size: int, port: int) -> Iterator[Any]:
    """vLLM's ``GroupCoordinator`` of the tensor-parallel ranks of this host; UnsupportedError where
    vLLM made no communicator of GPUs."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    let_vllm_use_nccl()
    torch.cuda.set_device(rank)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size, rank, f"tcp://127.0.0.1:{port}", rank, backend="nccl"
        )
        parallel_state.initialize_model_parallel(world_size)
        group = parallel_state.get_tp_group()
        if not hasattr(group.device_communicator, "ca_comm"):
            raise UnsupportedError(
                f"expected vLLM's communicator of NVIDIA GPUs, got {group.device_communicator}"
            )
        yield group


def fused_add_rms_norm(tensor: Any, residual: Any, weight: Any, eps: float) -> None:
    """vLLM's kernel: the tensor is added to the residual and becomes the norm of that, in place."""
    from vllm import _custom_ops

    _custom_ops.fused_add_rms_norm(tensor, residual, weight, eps)
