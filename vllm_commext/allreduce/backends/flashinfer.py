"""FlashInfer's all-reduce, one-shot and two-shot."""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_commext.allreduce import names
from vllm_commext.allreduce.backends import limits
from vllm_commext.allreduce.backends.flashinfer_workspaces import (
    MAX_MESSAGE_BYTES,
    MNNVL,
    TRTLLM,
    Workspace,
    WorkspaceKey,
    Workspaces,
    check_flashinfer,
)
from vllm_commext.allreduce.message import ITEM_BYTES, Message

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_shared = Workspaces()


def message_of(tensor: "torch.Tensor") -> Message:
    """Its shape and dtype."""
    return Message(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class FlashInferAllReduce:
    """The communicator of one group.

    The sums of 16-bit types are made in float32 and rounded once. The kernel lets its successor
    start only once it has ended: letting it start early is what gave NaNs for few tokens.

    Args:
        group: a process group that sends objects without a GPU.
        device: this rank's GPU.
        max_message_bytes: above it other backends serve; it bounds the workspaces.
        backend: ``trtllm``, or ``mnnvl`` where multicast is allowed.
        workspaces: where they are kept; those of the process unless a test has its own.

    Raises:
        UnsupportedError: FlashInfer is missing, too old, or cannot be compiled, on this rank.
    """

    def __init__(
        self,
        group: "ProcessGroup",
        device: "torch.device",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        backend: str = TRTLLM,
        workspaces: Workspaces = _shared,
    ) -> None:
        from torch import distributed

        self._comm = check_flashinfer()
        self.group, self.device, self.backend = group, device, backend
        self.world_size = distributed.get_world_size(group)
        self._max_message_bytes, self._workspaces = max_message_bytes, workspaces

    def _key(self, message: Message) -> WorkspaceKey:
        wide = message.dtype == "float32"
        return WorkspaceKey(self.group.group_name, wide, message.shape[-1], self.backend)

    def could_take(self, message: Message, *, one_shot: bool) -> bool:
        """Whether it takes it once the workspace is there; from the message alone."""
        if message.dtype not in ITEM_BYTES or len(message.shape) != 2:
            return False
        made = self._workspaces.find(self._key(message))
        bound = made.size.max_bytes if made else self._max_message_bytes
        takes = limits.flashinfer_one_shot if one_shot else limits.flashinfer_two_shot
        if not takes(message, self.world_size, bound):
            return False
        return made is None or self.backend != MNNVL or self._fits_mnnvl(made, message)

    def _fits_mnnvl(self, made: Workspace, message: Message) -> bool:
        """Its slots are cut by rules of its own; unlike ``trtllm`` it answers without a warning."""
        import torch

        dtype = getattr(torch, message.dtype)
        return made.handle.is_buffer_size_sufficient(self.world_size, *message.shape, dtype)

    def prepare(self, message: Message) -> bool:
        """Create the workspace for messages with such rows; collective. Whether there is one."""
        import torch

        if len(message.shape) != 2:
            return False
        one_row = Message((1, message.shape[1]), message.dtype)
        if not self.could_take(one_row, one_shot=True):
            return False
        dtype = getattr(torch, message.dtype)
        made = self._workspaces.get_or_create(
            self._key(message), dtype, self._max_message_bytes, self.group
        )
        return made is not None

    def is_ready(self, message: Message) -> bool:
        """Whether the workspace is there."""
        return len(message.shape) == 2 and self._workspaces.find(self._key(message)) is not None

    def all_reduce(self, tensor: "torch.Tensor", use_oneshot: bool | None = None) -> "torch.Tensor":
        """The sum in a fresh tensor.

        Args:
            tensor: [tokens, hidden], one that the backend's `takes` took.
            use_oneshot: which kernel; None leaves it to FlashInfer where both can.
        """
        made = self._workspaces.find(self._key(message_of(tensor)))
        assert made is not None, "all_reduce was called before it was made ready"
        if use_oneshot is None and self.backend == TRTLLM:
            both = self.could_take(message_of(tensor), one_shot=False)
            # FlashInfer knows no threshold of its own for other numbers of ranks.
            use_oneshot = None if both and self.world_size in (2, 4, 8) else True
        return self._comm.allreduce_fusion(
            input=tensor,
            workspace=made.handle,
            pattern=self._comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            use_oneshot=use_oneshot,
            fp32_acc=tensor.dtype.itemsize == 2,
        )

    def add_norm(
        self, tensor: "torch.Tensor", residual: "torch.Tensor", weight: "torch.Tensor", eps: float
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """The norm of the sum plus the residual, and that sum, by the one-shot kernel, as vLLM's
        fusion pass calls it; for a message that is ready and that the kernel takes."""
        import torch

        made = self._workspaces.find(self._key(message_of(tensor)))
        assert made is not None, "add_norm was called before it was made ready"
        out, new = torch.empty_like(tensor), torch.empty_like(tensor)
        self._comm.allreduce_fusion(
            input=tensor,
            workspace=made.handle,
            pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            residual_in=residual,
            residual_out=new,
            norm_out=out,
            rms_gamma=weight,
            rms_eps=eps,
            use_oneshot=True,
            fp32_acc=True,
        )
        return out, new

    def destroy(self) -> None:
        """Give back the group's workspaces; before the process group goes."""
        self._workspaces.destroy(self.group.group_name)


class FlashInferBackend:
    """One of FlashInfer's kernels as a backend; several share a communicator.

    Args:
        communicator: of the group.
        one_shot: the kernel; None where the communicator's own backend chooses (``mnnvl``).
    """

    def __init__(self, communicator: FlashInferAllReduce, one_shot: bool | None) -> None:
        self._communicator, self._one_shot = communicator, one_shot
        self.name = {
            True: names.FLASHINFER_ONE_SHOT,
            False: names.FLASHINFER_TWO_SHOT,
            None: names.FLASHINFER_MNNVL,
        }[one_shot]

    def takes(self, message: Message) -> bool:
        """Two dimensions, rows of whole 16-byte packs, up to the workspace's size."""
        return self._communicator.could_take(message, one_shot=self._one_shot is not False)

    def prepare(self, message: Message) -> None:
        """Create the workspace for messages with such rows; collective."""
        self._communicator.prepare(message)

    def is_ready(self, message: Message) -> bool:
        """Whether the workspace is there."""
        return self._communicator.is_ready(message)

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """One launch."""
        return self._communicator.all_reduce(tensor, self._one_shot)

    def add_norm(
        self, tensor: "torch.Tensor", residual: "torch.Tensor", weight: "torch.Tensor", eps: float
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """As the communicator's."""
        return self._communicator.add_norm(tensor, residual, weight, eps)

    def destroy(self) -> None:
        """Give back the workspaces of the group; a second call changes nothing."""
        self._communicator.destroy()


def get_fi_ar_workspace(
    world_size: int,
    rank: int,
    max_token_num: int,
    hidden_dim: int,
    dtype: "torch.dtype",
    group: "ProcessGroup",
) -> Any:
    """FlashInfer's workspace for rows of `hidden_dim`, created at the first call; collective.

    Returns:
        The one that the communicator uses too, or None where there is none or it is too small for
        `max_token_num` rows.
    """
    del rank, world_size
    importlib.import_module("flashinfer.comm")
    key = WorkspaceKey(group.group_name, dtype.itemsize == 4, hidden_dim)
    num_bytes = max_token_num * hidden_dim * dtype.itemsize
    made = _shared.get_or_create(key, dtype, num_bytes, group)
    return made.handle if made is not None and made.size.max_rows >= max_token_num else None


def allow_workspaces(num_bytes: int) -> None:
    """Change the memory budget of this process's workspaces; alike on all ranks."""
    _shared.budget_bytes = num_bytes


def make_backends(
    group: "ProcessGroup", device: "torch.device", max_message_bytes: int, *, mnnvl: bool
) -> list[FlashInferBackend]:
    """The backends that one group gets.

    Raises:
        UnsupportedError: FlashInfer cannot be used on this rank.
    """
    if mnnvl:
        return [
            FlashInferBackend(FlashInferAllReduce(group, device, max_message_bytes, MNNVL), None)
        ]
    shared = FlashInferAllReduce(group, device, max_message_bytes)
    return [FlashInferBackend(shared, one_shot) for one_shot in (True, False)]
