"""FlashInfer's all-reduce, one-shot and two-shot."""

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
from vllm_commext.allreduce.message import ITEM_BYTES, Message, message_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

shared = Workspaces()  # of this process


class FlashInferBackend:
    """One of FlashInfer's kernels for one group.

    The sums of 16-bit types are made in float32 and rounded once. The kernel lets its successor
    start only once it has ended: letting it start early is what gave NaNs for few tokens.

    Args:
        group: a process group that sends objects without a GPU.
        one_shot: the kernel; None for the one that ``mnnvl`` chooses, where multicast is allowed.
        max_message_bytes: above it other backends serve; it bounds the workspaces.
        workspaces: where they are kept; those of the process unless a test has its own.

    Raises:
        UnsupportedError: FlashInfer is missing, too old, or cannot be compiled, on this rank.
    """

    def __init__(
        self,
        group: "ProcessGroup",
        one_shot: bool | None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        workspaces: Workspaces = shared,
    ) -> None:
        from torch import distributed

        self.name = {
            True: names.FLASHINFER_ONE_SHOT,
            False: names.FLASHINFER_TWO_SHOT,
            None: names.FLASHINFER_MNNVL,
        }[one_shot]
        self._comm = check_flashinfer()
        self._group, self._one_shot = group, one_shot
        self._world_size = distributed.get_world_size(group)
        self._max_message_bytes, self._workspaces = max_message_bytes, workspaces

    def _key(self, message: Message) -> WorkspaceKey:
        wide, kind = message.dtype == "float32", MNNVL if self._one_shot is None else TRTLLM
        return WorkspaceKey(self._group.group_name, wide, message.shape[-1], kind)

    def takes(self, message: Message) -> bool:
        """Whether it has two dimensions, rows of whole 16-byte packs, and fits the workspace."""
        return self._takes(message, self._one_shot is not False)

    def _takes(self, message: Message, one_shot: bool) -> bool:
        if message.dtype not in ITEM_BYTES or len(message.shape) != 2:
            return False
        made = self._workspaces.find(self._key(message))
        bound = made.size.max_bytes if made else self._max_message_bytes
        takes = limits.flashinfer_one_shot if one_shot else limits.flashinfer_two_shot
        if not takes(message, self._world_size, bound):
            return False
        return made is None or self._one_shot is not None or self._fits_mnnvl(made, message)

    def _fits_mnnvl(self, made: Workspace, message: Message) -> bool:
        """Ask the workspace, whose slots have rules of their own; ``trtllm`` would answer with a
        warning."""
        import torch

        dtype = getattr(torch, message.dtype)
        return made.handle.is_buffer_size_sufficient(self._world_size, *message.shape, dtype)

    def prepare(self, message: Message) -> None:
        """Create the workspace for messages with such rows; collective."""
        import torch

        if len(message.shape) != 2:
            return
        if self._takes(Message((1, message.shape[1]), message.dtype), one_shot=True):
            dtype = getattr(torch, message.dtype)
            self._workspaces.get_or_create(
                self._key(message), dtype, self._max_message_bytes, self._group
            )

    def is_ready(self, message: Message) -> bool:
        return len(message.shape) == 2 and self._workspaces.find(self._key(message)) is not None

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return the sum of [tokens, hidden] in a fresh tensor."""
        return self._launch(
            tensor,
            self._comm.AllReduceFusionPattern.kAllReduce,
            use_oneshot=self._one_shot,
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
            use_oneshot=True,
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
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            **options,
        )

    def destroy(self) -> None:
        """Free the workspaces of the group; a second call changes nothing."""
        self._workspaces.destroy(self._group.group_name)


def make_backends(
    group: "ProcessGroup", max_message_bytes: int, *, mnnvl: bool
) -> list[FlashInferBackend]:
    """Make the backends of one group; UnsupportedError where FlashInfer cannot be used on this
    rank."""
    kernels = (None,) if mnnvl else (True, False)
    return [FlashInferBackend(group, one_shot, max_message_bytes) for one_shot in kernels]
