"""Steps that all ranks take together, and that succeed on all of them or fail on all.

A library that creates a shared workspace calls collectives of its own in between. Where it raises
on one rank, the others would wait in the next collective, or read what was meant for another. So
it gets a `Collective` to talk through: every exchange carries whether the sender is still well, a
rank that fails goes on to tell so at the others' next exchange, and all leave at the same one.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_commext.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")
Swap = Callable[[Any], list[Any]]  # a collective call: every rank's object, in the order of ranks


class _Stage(Enum):
    EXCHANGE = "exchange"
    DONE = "done"
    FAILED = "failed"


class _LeftError(Exception):
    """Another rank has failed, or is done while this one is not; every rank knows."""


class Collective:
    """A group of ranks that exchange Python objects; has the methods that FlashInfer calls.

    *swap* returns every rank's object and bounds its own wait; *group*: for `await_others`.
    """

    def __init__(
        self, rank: int, world_size: int, swap: Swap, group: "ProcessGroup | None" = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._swap, self._group = swap, group

    @classmethod
    def over(cls, group: "ProcessGroup | None") -> "Collective":
        """Return the ranks of a process group that sends objects without a GPU, such as gloo's.

        The bound of every wait is the group's own time-out. None is torch's default group.
        """
        import torch
        from torch import distributed

        rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)

        def swap(mine: Any) -> list[Any]:
            everybody: list[Any] = [None] * world_size
            # Inside inference mode gloo could not write into the tensors that carry the objects.
            with torch.inference_mode(mode=False):
                distributed.all_gather_object(everybody, mine, group=group)
            return everybody

        return cls(rank, world_size, swap, group)

    def _meet(self, stage: _Stage, value: Any) -> list[Any]:
        everybody = self._swap((stage, value))
        failed = [
            f"rank {rank}: {why}"
            for rank, (met, why) in enumerate(everybody)
            if met is _Stage.FAILED
        ]
        if failed:
            raise _LeftError("; ".join(failed))
        if any(met is not stage for met, _ in everybody):
            raise _LeftError("ranks diverged: they took different numbers of steps")
        return [value for _, value in everybody]

    def run(self, step: Callable[[], Value]) -> list[Value]:
        """Run `step` on every rank and return what it returned on each, in the order of ranks.

        The step may call this object's other methods, equally often on every rank, and returns
        something picklable. UnsupportedError where it failed on some rank names each and why.
        """
        try:
            value = step()
        except _LeftError as left:
            raise UnsupportedError(str(left)) from left
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._tell(_Stage.FAILED, why)
            raise UnsupportedError(f"rank {self.rank}: {why}") from error
        return self._tell(_Stage.DONE, value)

    def _tell(self, stage: _Stage, value: Any) -> list[Any]:
        try:
            return self._meet(stage, value)
        except _LeftError as left:
            raise UnsupportedError(str(left)) from left

    def agree(self, step: Callable[[], Value]) -> Value:
        """As `run`, for a step whose value stays on its rank; returns it."""
        found: list[Value] = []
        self.run(lambda: found.append(step()))
        return found[0]

    def await_others(self, seconds: float) -> None:
        """Wait for the other ranks to come here too, but not for longer; without a group, or where
        it is gone, not at all.

        Only a gloo group can bound the wait of a single barrier; with others there is no wait.
        """
        from torch import distributed

        if not distributed.is_initialized():
            return
        with contextlib.suppress(RuntimeError, ValueError):
            if distributed.get_backend(self._group) == "gloo":
                distributed.monitored_barrier(self._group, timedelta(seconds=seconds))

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(self._meet(_Stage.EXCHANGE, data))

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data if self.rank == root else None)[root]

    def barrier(self) -> None:
        self.allgather(None)

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.world_size

    def Split(self, color: int, key: int) -> "Collective":
        """Return itself: only a split that leaves all ranks together can be; UnsupportedError for
        another."""
        if len(set(self.allgather(color))) != 1:
            raise UnsupportedError(f"expected one colour on all ranks, got {color} and others")
        del key
        return self
