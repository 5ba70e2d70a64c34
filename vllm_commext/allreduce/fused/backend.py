"""Who can serve all-reduce, residual and norm together, and how our kernels do it."""

from typing import TYPE_CHECKING, Protocol

from vllm_commext.allreduce import names
from vllm_commext.allreduce.fused import layout as fused_layout
from vllm_commext.allreduce.fused.kernels import FusedKernels, Outputs, make_outputs
from vllm_commext.allreduce.fused.layout import FusedShape
from vllm_commext.allreduce.message import PACK_BYTES

if TYPE_CHECKING:
    import torch


class FusedBackend(Protocol):
    """One way to serve it in one launch.

    Attributes:
        name: one of `names.FUSED`.
    """

    name: str

    def prepare(self, shape: FusedShape) -> None:
        """Make ready what calls of this shape need; collective, and never while capturing.

        Raises:
            UnsupportedError: it failed on some rank; all ranks raise it.
        """
        ...

    def takes(self, shape: FusedShape, num_rows: int) -> bool:
        """Whether it can serve so many rows, once it is prepared; the same on all ranks."""
        ...

    def run(
        self,
        shape: FusedShape,
        x: "torch.Tensor",
        residual: "torch.Tensor | None",
        weight: "torch.Tensor",
        eps: float,
        scale: "torch.Tensor | None",
        next_weight: "torch.Tensor | None" = None,
    ) -> Outputs:
        """What `fused_op.all_reduce_add_rms_norm` says; tensors are as that was given them."""
        ...


class PushFused:
    """Our kernels: one launch, or several where the staging memory holds a part of the rows.

    Args:
        kernels: of the group.
        world_size: ranks of the group.
    """

    name = names.FUSED_PUSH

    def __init__(self, kernels: FusedKernels, world_size: int) -> None:
        self._kernels, self._world_size = kernels, world_size

    def prepare(self, shape: FusedShape) -> None:
        """Compile and load every form that a number of rows may need; collective."""
        self._kernels.prepare(shape, fused_layout.forms(shape, self._world_size))

    def takes(self, shape: FusedShape, num_rows: int) -> bool:
        """Any number of rows, if one finds room."""
        form = fused_layout.choose(shape, num_rows, self._world_size)
        return num_rows > 0 and self._kernels.fits(shape, form, 1)

    def run(
        self,
        shape: FusedShape,
        x: "torch.Tensor",
        residual: "torch.Tensor | None",
        weight: "torch.Tensor",
        eps: float,
        scale: "torch.Tensor | None",
        next_weight: "torch.Tensor | None" = None,
    ) -> Outputs:
        """Launches one after the other, on as many rows each as find room."""
        x, weight = plain(x), plain(weight)
        residual = None if residual is None else plain(residual)
        form = fused_layout.choose(shape, len(x), self._world_size)
        most = self._kernels.most_rows(shape, form)
        if len(x) <= most:
            to_new = (shape, form, x, residual, weight, eps, scale)
            return self._kernels.run(*to_new, next_weight=next_weight)
        outputs = make_outputs(shape, x, scale)
        for first in range(0, len(x), most):
            part = slice(first, first + most)
            scales = outputs.scales if len(outputs.scales) < len(x) else outputs.scales[part]
            to = Outputs(outputs.out[part], outputs.residual[part], scales)
            old = None if residual is None else residual[part]
            self._kernels.run(shape, form, x[part], old, weight, eps, scale, to)
        return outputs


def plain(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor itself where a kernel can take it, else a copy."""
    import torch

    if tensor.is_contiguous() and tensor.data_ptr() % PACK_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
