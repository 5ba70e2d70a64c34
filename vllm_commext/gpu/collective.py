"""Steps that succeed on all ranks or fail on all of them."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_commext.errors import CommextError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")
Swap = Callable[[Any], list[Any]]  # a collective call: everybody's objects, in the order of ranks


def exchange(
    step: Callable[[], Value], world_size: int, process_group: "ProcessGroup | None"
) -> list[Value]:
    """Run `step` on every rank and return what it returned on each, in the order of ranks.

    A rank whose step fails says so to the others instead of leaving them waiting. The wait itself
    is bounded by the group's own time-out. Values travel as the group sends objects.

    Raises:
        UnsupportedError: the step failed on some rank; the message names each and why.
    """
    return agree(step, swap_over(world_size, process_group))


def swap_over(world_size: int, process_group: "ProcessGroup | None") -> Swap:
    """What `agree` takes, over a process group."""
    import torch
    from torch import distributed

    def swap(mine: Any) -> list[Any]:
        everybody: list[Any] = [mine] * world_size
        if world_size > 1:
            # Inside inference mode gloo could not write into the tensors that carry the objects.
            with torch.inference_mode(mode=False):
                distributed.all_gather_object(everybody, mine, group=process_group)
        return everybody

    return swap


def agree(
    step: Callable[[], Value], swap: Swap, failure: type[CommextError] = UnsupportedError
) -> list[Value]:
    """As `exchange`, however the ranks swap objects; raises ``failure``."""
    value: Value | None = None
    error = ""
    try:
        value = step()
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        error = f"{type(caught).__name__}: {caught}"
    outcomes = swap((value, error))
    failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why]
    if failed:
        raise failure("; ".join(failed))
    return [outcome for outcome, _ in outcomes]


def await_others(process_group: "ProcessGroup | None", seconds: float) -> None:
    """Wait for the other ranks to come here too, but not for longer; for a group that is gone, not.

    Only a gloo group can bound the wait of a single barrier; with others there is no wait.
    """
    from torch import distributed

    if not distributed.is_initialized():
        return
    with contextlib.suppress(RuntimeError, ValueError):
        if distributed.get_backend(process_group) == "gloo":
            distributed.monitored_barrier(process_group, timedelta(seconds=seconds))
