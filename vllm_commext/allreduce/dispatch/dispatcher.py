"""Sends every tensor to the backend that the policy names for its shape and dtype."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_commext.allreduce import names
from vllm_commext.allreduce.backends.backend import Backend
from vllm_commext.allreduce.dispatch.policy import Policy
from vllm_commext.allreduce.message import ITEM_BYTES, PACK_BYTES, Message
from vllm_commext.allreduce.table.table import Table

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.commext.allreduce")

MAX_PLANS = 8192  # shapes whose choice is remembered; beyond it the memory is emptied


@dataclass
class _Plan:
    """The choice for one shape and dtype, and how often it was taken.

    Attributes:
        backend: None leaves it to vLLM's default dispatch.
        refused: backends that come before it in the table and could not take it.
    """

    backend: Backend | None
    refused: tuple[str, ...]
    calls: int = 0


class Dispatcher:
    """The all-reduce of one group.

    Everything is decided from shape and dtype, and from what all ranks agreed about at creation;
    all ranks make the same calls in the same order, and so choose alike.

    Args:
        backends: those that were created on every rank.
        world_size: the number of ranks.
        table: what was measured, the same on every rank.
        forced: see `Policy`.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        world_size: int,
        table: Table | None,
        forced: str | None = None,
    ) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self.world_size, self.table, self._forced = world_size, table, forced
        self._policy = Policy(
            {name: backend.takes for name, backend in self.backends.items()}, table, forced
        )
        self._plans: dict[tuple[torch.Size, torch.dtype], _Plan] = {}
        self._past: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def use_table(self, table: Table) -> None:
        """Choose by another table from now on; on all ranks at the same point."""
        self._forget_plans()
        self.table = table
        self._policy = Policy(
            {name: backend.takes for name, backend in self.backends.items()}, table, self._forced
        )

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor | None":
        """The sum over all ranks in a fresh tensor laid out as `tensor`, or None.

        None means that no backend of ours serves it, and vLLM's default dispatch should.
        """
        plan = self._plans.get((tensor.shape, tensor.dtype)) or self._make_plan(tensor)
        plan.calls += 1
        if plan.backend is None:
            return None
        if tensor.is_contiguous() and tensor.data_ptr() % PACK_BYTES == 0:
            return plan.backend.all_reduce(tensor)
        return _sum_of_copy(plan.backend, tensor)

    def choice(self, tensor: "torch.Tensor") -> str:
        """The backend that `all_reduce` takes for such a tensor; collective as that is."""
        plan = self._plans.get((tensor.shape, tensor.dtype)) or self._make_plan(tensor)
        return plan.backend.name if plan.backend else names.VLLM

    def _make_plan(self, tensor: "torch.Tensor") -> _Plan:
        message = Message(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if message.num_elements == 0 and message.dtype in ITEM_BYTES:
            return _Plan(_Empty(), ())
        capturing = _is_capturing(tensor)
        if not capturing:
            self._anticipate(message)
        plan = self._plan(message)
        # What a capture finds not ready may be ready later, so such a choice is not kept.
        if not capturing or plan.refused == ():
            if len(self._plans) >= MAX_PLANS:
                self._forget_plans()
            self._plans[tensor.shape, tensor.dtype] = plan
        return plan

    def _plan(self, message: Message) -> _Plan:
        for name in self._policy.candidates(message):
            if self.backends[name].is_ready(message):
                ranking = self._policy.ranking(message)
                return _Plan(self.backends[name], ranking[: ranking.index(name)])
        return _Plan(None, self._policy.ranking(message))

    def _anticipate(self, message: Message) -> None:
        """Create what this message or a smaller one with such rows will need.

        The first message with a hidden size is often vLLM's largest, which another backend serves.
        What the small ones need is created then all the same: a capture would come too late.
        """
        if len(message.shape) != 2 or message.dtype not in ITEM_BYTES:
            return
        for name, backend in self.backends.items():
            led = self.table is not None and self.table.leads_up_to(message.dtype, (name,))
            if led or self._forced == name:
                backend.prepare(message)

    def _forget_plans(self) -> None:
        self._past = self.counts()
        self._plans.clear()

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Calls by the backend that served them, and refusals by the backend that refused.

        Under CUDA graphs a call is counted where it is captured, not where it is replayed.
        """
        served, refused = Counter(self._past[0]), Counter(self._past[1])
        for plan in self._plans.values():
            served[plan.backend.name if plan.backend else names.VLLM] += plan.calls
            for name in plan.refused:
                refused[name] += plan.calls
        return served, refused

    def destroy(self) -> None:
        """Give back what the backends hold; before the process groups go."""
        self._forget_plans()
        for backend in self.backends.values():
            backend.destroy()
        self.backends.clear()
        self._policy = Policy({}, None)


class _Empty:
    """Of a tensor without elements: nothing to sum, and nothing to launch."""

    name = "empty"

    def takes(self, message: Message) -> bool:
        return message.num_elements == 0

    def prepare(self, message: Message) -> None:
        pass

    def is_ready(self, message: Message) -> bool:
        return message.num_elements == 0

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor":
        import torch

        return torch.empty_like(tensor)

    def destroy(self) -> None:
        pass


def _is_capturing(tensor: "torch.Tensor") -> bool:
    import torch

    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _sum_of_copy(backend: Backend, tensor: "torch.Tensor") -> "torch.Tensor":
    """Of a tensor with gaps, permuted dimensions or an odd address: by way of a plain copy."""
    import torch

    out = torch.empty_like(tensor)
    copy = tensor.clone(memory_format=torch.contiguous_format)
    return out.copy_(backend.all_reduce(copy))
