"""FlashInfer's one-shot all-reduce and its workspaces: one a group, dtype class and hidden size,
within a memory budget.

Creating one is collective and succeeds on all ranks or on none. Python's random state is left as it
was: FlashInfer names its sockets by it, and vLLM seeds all ranks alike."""

import importlib
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from packaging.version import Version

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.limits import ITEM_BYTES, Message, message_of
from vllm_commext.allreduce.machine import TORCH_SWITCH
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


logger = logging.getLogger("vllm.commext.allreduce")

OLDEST = Version("0.6.16")  # the first whose trtllm workspace does without multicast
MIB = 1 << 20
BUDGET_BYTES = 256 * MIB  # of all workspaces of one process
MEASURING_BYTES = 4096 * MIB  # where all hidden sizes are measured, and nothing else is there
MAX_MESSAGE_BYTES = 8 * MIB


@dataclass(frozen=True)
class WorkspaceKey:
    """Name of a workspace within a process. `wide` is float32, whose sentinel has 32 bits, else
    both 16-bit types."""

    group_name: str
    wide: bool
    hidden: int


@dataclass
class Workspace:
    """A workspace and the largest message that it takes; `handle` is FlashInfer's own object."""

    handle: Any
    size: limits.WorkspaceSize


def check_flashinfer() -> Any:
    """Import FlashInfer's collectives and load its kernels; UnsupportedError where that fails."""
    try:
        version = Version(importlib.import_module("flashinfer").__version__)
        comm = importlib.import_module("flashinfer.comm")
    except ImportError as error:
        raise UnsupportedError(f"FlashInfer cannot be imported: {error}") from error
    if version < OLDEST:
        raise UnsupportedError(f"expected FlashInfer {OLDEST} or newer, found {version}")
    try:
        importlib.import_module("flashinfer.comm.trtllm_ar").get_trtllm_comm_module()
    except Exception as error:
        reason = str(error).strip().splitlines()[:1] or [""]
        raise UnsupportedError(f"FlashInfer's kernels cannot be compiled: {reason[0]}") from error
    return comm


def is_compiled() -> bool:
    try:
        module = importlib.import_module("flashinfer.jit.comm").gen_trtllm_comm_module()
        return bool(module.is_compiled)
    except Exception:  # noqa: BLE001 - whatever is amiss, it cannot be used at once
        return False


@contextmanager
def own_random_state() -> Iterator[None]:
    """Unpredictable random numbers inside; the sequence outside goes on as if nothing was drawn."""
    state = random.getstate()
    random.seed(int.from_bytes(os.urandom(16), "big"))
    try:
        yield
    finally:
        random.setstate(state)


class Workspaces:
    """All workspaces of a process, within `budget_bytes` of GPU memory."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self._made: dict[WorkspaceKey, Workspace | None] = {}

    @property
    def device_bytes(self) -> int:
        return sum(made.size.device_bytes for made in self._made.values() if made)

    def find(self, key: WorkspaceKey) -> Workspace | None:
        return self._made.get(key)

    def get_or_create(
        self, key: WorkspaceKey, dtype: "torch.dtype", max_message_bytes: int, group: "ProcessGroup"
    ) -> Workspace | None:
        """Return the workspace, created at the first call; collective. A failure is logged once."""
        if key not in self._made:
            self._made[key] = self._try_create(key, dtype, max_message_bytes, group)
        return self._made[key]

    def _try_create(
        self, key: WorkspaceKey, dtype: "torch.dtype", max_message_bytes: int, group: "ProcessGroup"
    ) -> Workspace | None:
        collective = Collective.over(group)
        left = self.budget_bytes - self.device_bytes
        size = limits.flashinfer_workspace(
            key.hidden, dtype.itemsize, collective.world_size, max_message_bytes, left
        )
        if size.max_rows < 1:
            logger.info("commext: allreduce: no memory budget for FlashInfer's %s", key)
            return None
        handles: list[Any] = []
        try:
            collective.agree(lambda: _check_memory(size.device_bytes))
            collective.agree(
                lambda: handles.append(_create(key, dtype, size.max_rows, collective, group))
            )
        except UnsupportedError as error:
            for handle in handles:
                _release(handle)
            if collective.rank == 0:
                logger.warning(
                    "commext: allreduce: no FlashInfer workspace, other backends remain: %s", error
                )
            return None
        return Workspace(handles[0], size)

    def destroy(self, group_name: str | None = None) -> None:
        """Free those of a group, or all; they can be created again afterwards."""
        for key in [key for key in self._made if group_name in (None, key.group_name)]:
            made = self._made.pop(key)
            if made is not None:
                _release(made.handle)


def _check_memory(num_bytes: int) -> None:
    import torch

    free, _ = torch.cuda.mem_get_info()
    if free < 2 * num_bytes:
        raise UnsupportedError(
            f"expected {2 * num_bytes >> 20} MiB of free GPU memory, got {free >> 20} MiB"
        )


def _create(
    key: WorkspaceKey,
    dtype: "torch.dtype",
    max_rows: int,
    collective: Collective,
    group: "ProcessGroup",
) -> Any:
    comm = importlib.import_module("flashinfer.comm")
    # Where FlashInfer shares memory through torch, torch's rendezvous is to keep off it too.
    with own_random_state(), patch.dict(os.environ, {TORCH_SWITCH: "1"}):
        return comm.create_allreduce_fusion_workspace(
            backend="trtllm",  # which needs no multicast
            world_size=collective.world_size,
            rank=collective.rank,
            max_token_num=max_rows,
            hidden_dim=key.hidden,
            dtype=dtype,
            comm_backend=collective,
            group=group,
        )


def _release(handle: Any) -> None:
    """Free the memory, of which FlashInfer keeps a second reference in a table of its own."""
    forget = getattr(
        importlib.import_module("flashinfer.comm.trtllm_ar"),
        "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
        None,
    )
    if forget is not None and hasattr(handle, "ipc_handles"):
        forget(handle.ipc_handles)
    handle.destroy()


shared = Workspaces()  # of this process


class FlashInferBackend:
    """FlashInfer's one-shot kernel for one group.

    The sums of 16-bit types are made in float32 and rounded once. The kernel lets its successor
    start only once it has ended: letting it start early is what gave NaNs for few tokens.

    UnsupportedError where FlashInfer is missing, too old, or cannot be compiled. Above
    `max_message_bytes`, which bounds the workspaces, other backends serve."""

    name = limits.FLASHINFER_ONE_SHOT

    def __init__(
        self,
        group: "ProcessGroup",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        workspaces: Workspaces = shared,
    ) -> None:
        from torch import distributed

        self._comm = check_flashinfer()
        self._group = group
        self._world_size = distributed.get_world_size(group)
        self._max_message_bytes, self._workspaces = max_message_bytes, workspaces

    def _key(self, message: Message) -> WorkspaceKey:
        return WorkspaceKey(self._group.group_name, message.dtype == "float32", message.shape[-1])

    def takes(self, message: Message) -> bool:
        if message.dtype not in ITEM_BYTES or len(message.shape) != 2:
            return False
        made = self._workspaces.find(self._key(message))
        bound = made.size.max_bytes if made else self._max_message_bytes
        return limits.flashinfer_one_shot(message, self._world_size, bound)

    def prepare(self, message: Message) -> None:
        import torch

        if len(message.shape) != 2:
            return
        if self.takes(Message((1, message.shape[1]), message.dtype)):
            dtype = getattr(torch, message.dtype)
            self._workspaces.get_or_create(
                self._key(message), dtype, self._max_message_bytes, self._group
            )

    def is_ready(self, message: Message) -> bool:
        return len(message.shape) == 2 and self._workspaces.find(self._key(message)) is not None

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        return self._launch(
            tensor,
            self._comm.AllReduceFusionPattern.kAllReduce,
            fp32_acc=tensor.dtype.itemsize == 2,
        )

    def add_norm(
        self, tensor: "torch.Tensor", residual: "torch.Tensor", weight: "torch.Tensor", eps: float
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the norm of the sum plus the residual, and that sum, by the one-shot kernel, as
        vLLM's fusion pass calls it; for a message that is ready and that the kernel takes."""
        import torch

        out, new = torch.empty_like(tensor), torch.empty_like(tensor)
        self._launch(
            tensor,
            self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=new,
            norm_out=out,
            rms_gamma=weight,
            rms_eps=eps,
            fp32_acc=True,
        )
        return out, new

    def _launch(self, tensor: "torch.Tensor", pattern: Any, **options: Any) -> "torch.Tensor":
        made = self._workspaces.find(self._key(message_of(tensor)))
        assert made is not None, "it was called before it was made ready"
        return self._comm.allreduce_fusion(
            input=tensor,
            workspace=made.handle,
            pattern=pattern,
            use_oneshot=True,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            **options,
        )

    def destroy(self) -> None:
        self._workspaces.destroy(self._group.group_name)
