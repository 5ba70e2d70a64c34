"""The choice of a backend for every message, and the all-reduce of a group."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.backend import Backend
from vllm_commext.allreduce.limits import ITEM_BYTES, PACK_BYTES, Message, message_of
from vllm_commext.allreduce.table import Table

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.commext.allreduce")

MAX_PLANS = 8192  # shapes whose choice is remembered; beyond it the memory is emptied


class FusedPolicy:
    """Order in which to try who serves an all-reduce with residual and norm.

    Args:
        forced: the one backend that the user wants for all sums: with ours come our kernels, with
            another one nothing is fused.
        throughout: a graph is ours only where one launch comes first for each of its messages.
    """

    def __init__(
        self, table: Table | None, forced: str | None = None, *, throughout: bool = False
    ) -> None:
        self._table, self.forced, self._throughout = table, forced, throughout

    def ranking(self, num_bytes: int, dtype: str) -> tuple[str, ...]:
        """Members of `limits.FUSED`, the fastest first; none where nothing is known."""
        if self.forced is not None:
            return (limits.FUSED_PUSH,) if self.forced == limits.PUSH else ()
        return self._table.fused_ranking(num_bytes, dtype) if self._table else ()

    def is_led(self, dtype: str, low_bytes: int, high_bytes: int) -> bool:
        """Return whether our launch comes first for messages within these bounds: for some, or for
        all if `throughout`. Where FlashInfer's does, vLLM's own pass puts it there."""
        rows = self._table.fused.get(dtype, ()) if self._table else ()
        starts = [low_bytes, *(row.max_bytes + 1 for row in rows)]
        within = (size for size in starts if low_bytes <= size <= high_bytes)
        led = (self.ranking(size, dtype)[:1] == (limits.FUSED_PUSH,) for size in within)
        return all(led) if self._throughout else any(led)

    def changes(self, dtype: str) -> list[int]:
        """Sizes up to which a choice holds, where one launch comes first on one side of them and
        not on the other; none where the policy takes a graph for some of its messages."""
        rows = self._table.fused.get(dtype, ()) if self._table and self._throughout else ()
        return [
            row.max_bytes
            for row in rows[:-1]
            if self.is_led(dtype, row.max_bytes, row.max_bytes)
            != self.is_led(dtype, row.max_bytes + 1, row.max_bytes + 1)
        ]

    def identity(self) -> str:
        fused = self._table.fused if self._table else {}
        return msgspec.json.encode([self.forced, self._throughout, fused], order="sorted").decode()


@dataclass
class _Plan:
    """The choice for one shape and dtype, None for vLLM's default dispatch; the backends before it
    in the table, which could not take it; and how often it was taken."""

    backend: Backend | None
    refused: tuple[str, ...]
    calls: int = 0


class Dispatcher:
    """The all-reduce of one group.

    Everything is decided from shape and dtype, and from what all ranks agreed about at creation:
    the backends that every one has, and the table. All make the same calls in the same order, and
    so choose alike. *forced*: the one that the user wants, `limits.VLLM` for none of ours, or None.
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
        self._plans: dict[tuple[torch.Size, torch.dtype], _Plan] = {}
        self._past: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def all_reduce(self, tensor: "torch.Tensor") -> "torch.Tensor | None":
        """Return the sum over all ranks in a fresh tensor laid out as `tensor`, or None.

        None means that no backend of ours serves it, and vLLM's default dispatch should."""
        if not tensor.numel():
            return tensor.new_empty(tensor.shape)  # nothing to sum, and nothing to launch
        plan = self._plans.get((tensor.shape, tensor.dtype)) or self._make_plan(tensor)
        plan.calls += 1
        if plan.backend is None:
            return None
        if tensor.is_contiguous() and tensor.data_ptr() % PACK_BYTES == 0:
            return plan.backend.all_reduce(tensor)
        return _sum_of_copy(plan.backend, tensor)

    def choice(self, tensor: "torch.Tensor") -> str:
        """Name the backend that `all_reduce` takes for such a tensor; collective as that is."""
        plan = self._plans.get((tensor.shape, tensor.dtype)) or self._make_plan(tensor)
        return plan.backend.name if plan.backend else limits.VLLM

    def _make_plan(self, tensor: "torch.Tensor") -> _Plan:
        message = message_of(tensor)
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
        ranking = self._ranking(message)
        for place, name in enumerate(ranking):
            backend = self.backends.get(name)
            if backend is not None and backend.takes(message) and backend.is_ready(message):
                return _Plan(backend, ranking[:place])
        return _Plan(None, ranking)

    def _ranking(self, message: Message) -> tuple[str, ...]:
        """Backends by speed, whether or not they can take the message; none of what is vLLM's."""
        if message.dtype not in ITEM_BYTES or self._forced == limits.VLLM:
            return ()
        if self._forced is not None:
            return (self._forced,)
        ranking = self.table.ranking(message.num_bytes, message.dtype) if self.table else ()
        return ranking[: ranking.index(limits.VLLM)] if limits.VLLM in ranking else ranking

    def _anticipate(self, message: Message) -> None:
        """Create what this message or a smaller one with such rows will need: the first one is
        often vLLM's largest, and a capture would come too late."""
        if len(message.shape) != 2 or message.dtype not in ITEM_BYTES:
            return
        for name, backend in self.backends.items():
            led = self.table is not None and self.table.leads_up_to(message.dtype, name)
            if led or self._forced == name:
                backend.prepare(message)

    def _forget_plans(self) -> None:
        self._past = self.counts()
        self._plans.clear()

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Calls by the backend that served them, and refusals by the backend that refused.

        Under CUDA graphs a call is counted where it is captured, not where it is replayed."""
        served, refused = Counter(self._past[0]), Counter(self._past[1])
        for plan in self._plans.values():
            served[plan.backend.name if plan.backend else limits.VLLM] += plan.calls
            for name in plan.refused:
                refused[name] += plan.calls
        return served, refused

    def destroy(self) -> None:
        """Free what the backends hold; before the process groups go."""
        self._forget_plans()
        for backend in self.backends.values():
            backend.destroy()
        self.backends.clear()
        self.table = self._forced = None


def _is_capturing(tensor: "torch.Tensor") -> bool:
    import torch

    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _sum_of_copy(backend: Backend, tensor: "torch.Tensor") -> "torch.Tensor":
    """Sum a tensor with gaps, permuted dimensions or an odd address by way of a plain copy."""
    import torch

    out = torch.empty_like(tensor)
    copy = tensor.clone(memory_format=torch.contiguous_format)
    return out.copy_(backend.all_reduce(copy))
