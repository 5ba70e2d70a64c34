"""Tensor-parallel groups: facts that decide if our kernels take part in one of vLLM's, on which its
ranks agree once; and one in a process that serves no model, to tune and to measure."""

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_commext.allreduce import machine
from vllm_commext.allreduce.creation import ANY_HOST, Facts
from vllm_commext.collective import Collective
from vllm_commext.compat.monkey_patch import is_patched, patch
from vllm_commext.errors import UnsupportedError
from vllm_commext.settings import TOGGLES, read_settings

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


MOST_RANKS = 8
ONE_PARENT = "mp"  # vLLM's executor that starts all workers of a host by itself
SETTINGS = ("allreduce", "reduce_rms")  # toggles whose names begin so matter
DTYPES = ("bfloat16", "float16", "float32")
NCCL_PATH = "VLLM_NCCL_SO_PATH"
NCCL_BINDING = "vllm.distributed.device_communicators.pynccl_wrapper"
NCCL_NAME = "libnccl.so.2"
SLEEP_FUNCTIONS = ("ncclCommSuspend", "ncclCommResume")
_agreed: "list[tuple[ProcessGroup, Facts | UnsupportedError]]" = []


def why_not_by_itself(config: Any, world_size: int) -> str:
    """Reason why `auto` leaves a group alone; empty where it may take part.

    It asks no other rank: one of another host may not have this package, and would not answer. So
    only workers that one parent has started count, which have one environment."""
    model = getattr(config, "model_config", None)
    if model is None:
        return "no engine serves a model here"
    parallel = config.parallel_config
    if not 2 <= world_size <= MOST_RANKS:
        return f"proven for 2 to {MOST_RANKS} GPUs, and these are {world_size}"
    backend = parallel.distributed_executor_backend
    if backend != ONE_PARENT or parallel.nnodes_within_dp > 1:
        where = f"executor {backend!r}, {parallel.nnodes_within_dp} nodes"
        return f"proven on one host, whose workers one process has started, and this is {where}"
    if parallel.enable_elastic_ep:
        return "--enable-elastic-ep lets ranks come and go"
    if parallel.disable_custom_all_reduce:
        return "--disable-custom-all-reduce asks for no kernels of the kind"
    return ""


def _settings() -> tuple[str, ...]:
    chosen = read_settings()
    return tuple(
        f"{toggle.name}={chosen[toggle.field]}"
        for toggle in TOGGLES
        if toggle.field.startswith(SETTINGS)
    )


def _has_multicast(device: "torch.device") -> bool:
    if all(os.environ.get(name) == value for name, value in machine.NO_MULTICAST_IN_VLLM.items()):
        return False
    from vllm_commext.gpu.launch import check

    driver: Any = importlib.import_module("cuda.bindings.driver")
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    return bool(check(driver.cuDeviceGetAttribute(attribute, device.index or 0)))


def read(config: Any, device: "torch.device") -> Facts:
    import torch
    from vllm import envs

    from vllm_commext.anonymous_memory import host_identity

    on_gpu = device.type == "cuda"
    facts = Facts(
        host=host_identity(),
        gpu=torch.cuda.get_device_name(device) if on_gpu else "",
        invariant=bool(envs.VLLM_BATCH_INVARIANT),
        microbatches=microbatches(config),
        multicast=_has_multicast(device) if on_gpu else False,
        settings=_settings(),
    )
    model = getattr(config, "model_config", None)
    if model is None:
        return facts
    has_graphs = getattr(config.compilation_config.cudagraph_mode, "name", "") != "NONE"
    dtype = str(model.dtype).removeprefix("torch.")
    return replace(
        facts,
        dtype=dtype if dtype in DTYPES else facts.dtype,
        hidden=model.get_hidden_size(),
        max_tokens=int(config.scheduler_config.max_num_batched_tokens),
        eager=bool(model.enforce_eager) or not has_graphs,
    )


def _differences(everybody: Sequence[Facts]) -> str:
    values = {
        field.name: [getattr(facts, field.name) for facts in everybody] for field in fields(Facts)
    }
    unlike = {name: of for name, of in values.items() if len(set(of)) > 1}
    return ", ".join(f"{name} {of}" for name, of in unlike.items())


def agree_about(read: Callable[[], Facts], collective: Collective) -> Facts:
    """Return the record that all ranks read alike; collective.

    Raises:
        UnsupportedError: the ranks are on several hosts, or differ in something; all raise it.
    """
    everybody = collective.run(read)
    hosts = {facts.host for facts in everybody}
    if len(hosts) > 1:
        raise UnsupportedError(f"its ranks are on {len(hosts)} hosts")
    alike = [replace(facts, host=ANY_HOST) for facts in everybody]
    if len(set(alike)) > 1:
        raise UnsupportedError(
            f"expected the same on all ranks, got {_differences(alike)} in the order of ranks; set "
            "the toggles alike"
        )
    return everybody[0]


def agreed(group: "ProcessGroup", device: "torch.device") -> Facts:
    """Facts that all ranks of a group state; collective at its first call, then remembered.

    Raises:
        UnsupportedError: they are on several hosts or differ; all ranks raise it, at each call.
    """
    found = next((found for known, found in _agreed if known is group), None)
    if found is None:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        try:
            found = agree_about(lambda: read(config, device), Collective.over(group))
        except UnsupportedError as error:
            found = error
        _agreed.append((group, found))
    if isinstance(found, UnsupportedError):
        raise found
    return found


def forget(group: "ProcessGroup") -> None:
    """Ask again should there be another group in its place."""
    _agreed[:] = [each for each in _agreed if each[0] is not group]


def microbatches(config: Any) -> bool:
    return config is not None and bool(config.parallel_config.use_ubatching)


def help_vllm_find_nccl(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell vLLM where the NCCL is that came with torch, unless the user has: vLLM looks for it by
    name alone, which fails where the packages lie outside the loader's path."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for found in sorted(Path(folder).glob("*/lib/libnccl.so*")):
            environ.setdefault(NCCL_PATH, str(found))


def let_vllm_use_nccl() -> tuple[str, ...]:
    """Make vLLM's own binding of NCCL work with a library that lacks what only sleep mode needs.

    vLLM otherwise does without its binding, and every sum through torch costs a copy more. Returns
    the functions that the library lacks."""
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
