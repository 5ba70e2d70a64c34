"""What a model has around an all-reduce, to measure it in its place: GEMM, all-reduce, norm.

A chain of all-reduces alone favours kernels that begin before their predecessor has ended, and
finds in the caches what a model finds in memory.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_commext.allreduce import names
from vllm_commext.allreduce.dispatch.dispatcher import Dispatcher
from vllm_commext.allreduce.message import Message

if TYPE_CHECKING:
    import torch

    from vllm_commext.collective import Collective

Call = Callable[["torch.Tensor"], Any]
Norm = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", float], None]
"""Adds a tensor to the residual, both [rows, hidden], and makes it the norm of that, in place."""
Fused = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", float], Any]
"""Takes this rank's part of the sum, residual, weight and epsilon; returns new tensors."""

BASELINE = "matrix product alone"
COPIES = 4  # of the matrix, so that none is in the cache when its turn comes
EPS = 1e-5
SMALLEST = 0.1  # microseconds, of a difference of two medians


class Neighbours:
    """The matrix product before the all-reduce of a message, and the residual and norm after it.

    Args:
        message: [rows, hidden]; the product contracts half as many elements as a row has.
        norm: see `Norm`.
        device: where the tensors are.
    """

    def __init__(self, message: Message, norm: Norm, device: str = "cuda") -> None:
        import torch

        rows, hidden = message.shape
        dtype = getattr(torch, message.dtype)
        self._norm, self._inner, self._turn = norm, max(1, hidden // 2), 0
        self._matrices = [
            torch.empty(hidden, self._inner, dtype=dtype, device=device).normal_(std=0.02)
            for _ in range(COPIES)
        ]
        self._residual = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self._weight = torch.ones(hidden, dtype=dtype, device=device)

    def product(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Of the tensor's first columns with another matrix each time."""
        from torch.nn.functional import linear

        self._turn += 1
        return linear(tensor[:, : self._inner], self._matrices[self._turn % COPIES])

    def apart(self, all_reduce: Call) -> Call:
        """Product, all-reduce and norm, each by a kernel of its own."""

        def call(tensor: "torch.Tensor") -> Any:
            out = all_reduce(self.product(tensor))
            self._norm(out, self._residual, self._weight, EPS)
            return out

        return call

    def together(self, fused: Fused) -> Call:
        """Product, and then one launch for the rest."""
        return lambda tensor: fused(self.product(tensor), self._residual, self._weight, EPS)

    def calls(self, backends: Mapping[str, Call], fused: Mapping[str, Fused]) -> dict[str, Call]:
        """All of them by name, and the product `BASELINE`."""
        made = {name: self.apart(call) for name, call in backends.items()}
        made |= {name: self.together(call) for name, call in fused.items()}
        return {BASELINE: self.product, **made}


def without_product(times: Mapping[str, float]) -> dict[str, float]:
    """What each takes beyond the product."""
    alone = times.get(BASELINE, 0.0)
    return {name: max(of - alone, SMALLEST) for name, of in times.items() if name != BASELINE}


def fused_calls(
    dispatcher: Dispatcher, collective: "Collective", message: Message
) -> dict[str, Fused]:
    """Who serves it with residual and norm in one launch, each ready; collective."""
    from vllm_commext.allreduce.backends.flashinfer import FlashInferBackend
    from vllm_commext.allreduce.backends.push import PushBackend
    from vllm_commext.allreduce.fused.backend import PushFused
    from vllm_commext.allreduce.fused.kernels import FusedKernels
    from vllm_commext.allreduce.fused.layout import FusedShape
    from vllm_commext.allreduce.fused.op import is_prepared

    found: dict[str, Fused] = {}
    rows, hidden = message.shape
    shape = FusedShape(message.dtype, message.dtype, hidden)
    push = dispatcher.backends.get(names.PUSH)
    if isinstance(push, PushBackend):
        ours = PushFused(FusedKernels(push.memory, collective), collective.world_size)
        if is_prepared(ours, shape) and ours.takes(shape, rows):
            found[names.FUSED_PUSH] = lambda x, residual, weight, eps: ours.run(
                shape, x, residual, weight, eps, None
            )
    theirs = dispatcher.backends.get(names.FLASHINFER_ONE_SHOT)
    # In float32 it has ended with an illegal memory access.
    if isinstance(theirs, FlashInferBackend) and message.dtype != "float32":
        theirs.prepare(message)
        if theirs.is_ready(message) and theirs.takes(message):
            found[names.FUSED_FLASHINFER] = theirs.add_norm
    return found
