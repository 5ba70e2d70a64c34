"""Backends: the interface that the dispatcher uses, and the two that need nothing of their own."""

from typing import TYPE_CHECKING, Any, Protocol

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.limits import ITEM_BYTES, Message
from vllm_commext.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Backend(Protocol):
    """One way to sum a tensor over all ranks; `name` is one of `limits.BACKENDS`."""

    name: str

    def takes(self, message: Message) -> bool:
        """Decide from the message alone, so that all ranks say the same."""
        ...

    def prepare(self, message: Message) -> None:
        """Create what messages like this one need; collective, and never while capturing."""
        ...

    def is_ready(self, message: Message) -> bool:
        """The same on all ranks."""
        ...

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return the sum in a fresh tensor; `tensor` is contiguous, aligned to 16 bytes and not
        empty."""
        ...

    def destroy(self) -> None:
        """Free what it holds; collective where it holds memory that others have mapped."""
        ...


class Ready:
    """Base of backends that need no preparation and hold nothing."""

    def prepare(self, message: Message) -> None: ...

    def is_ready(self, message: Message) -> bool:
        del message
        return True

    def destroy(self) -> None: ...


class CustomBackend(Ready):
    """vLLM's ``CustomAllreduce``, which vLLM creates, and whose buffers it registers after a
    capture."""

    name = limits.CUSTOM

    def __init__(self, communicator: Any) -> None:
        if communicator is None:
            raise UnsupportedError("vLLM has none")
        self._communicator = communicator

    def takes(self, message: Message) -> bool:
        ours = self._communicator
        return limits.custom(message, ours.world_size, ours.max_size, bool(ours.fully_connected))

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Call it as vLLM does: in a capture the tensor itself is registered, else it is copied."""
        return self._communicator.custom_all_reduce(tensor)


class NcclBackend(Ready):
    """NCCL, through vLLM's ``PyNcclCommunicator`` where that has found the library, else through
    torch and the process group of the GPUs."""

    name = limits.NCCL

    def __init__(self, pynccl: Any, device_group: "ProcessGroup | None") -> None:
        self._pynccl, self._device_group = pynccl, device_group

    @property
    def through(self) -> str:
        usable = self._pynccl is not None and not self._pynccl.disabled
        return "pynccl" if usable else "torch"

    def takes(self, message: Message) -> bool:
        return message.dtype in ITEM_BYTES

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        if self.through == "pynccl":
            return self._pynccl.all_reduce(tensor)
        from torch import distributed

        out = tensor.clone()
        distributed.all_reduce(out, group=self._device_group)
        return out
