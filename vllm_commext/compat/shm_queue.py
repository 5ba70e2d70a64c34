"""Our message queue in place of vLLM's, at every name that vLLM has bound to the class: among the
ranks of a process group, and for vLLM's own steps.

The order of the collective calls is vLLM's, because its other code runs between them."""

import functools
import logging
import sys
from types import FunctionType
from typing import Any, ClassVar

import torch.distributed as dist

from vllm_commext.compat.monkey_patch import SYMBOLS, is_patched, original_of, patch
from vllm_commext.errors import UnsupportedError
from vllm_commext.shm.codec import StepClasses
from vllm_commext.shm.queue import Handle, MessageQueue

logger = logging.getLogger("vllm.commext.shm")

DEFINED_IN = "vllm.distributed.device_communicators.shm_broadcast"
NAME = "MessageQueue"
LEFT = "commext: shm_queue: left to vLLM's own: %s"


@functools.cache
def vllm_steps() -> StepClasses | None:
    """vLLM's classes of what the engine and its workers send one another in each step; None, and a
    line that says why, where they differ from what the codec was made for."""
    try:
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
        from vllm.v1.executor.multiproc_executor import WorkerProc
        from vllm.v1.outputs import ModelRunnerOutput

        status = WorkerProc.ResponseStatus
        kinds = SchedulerOutput, NewRequestData, CachedRequestData, ModelRunnerOutput
        found = StepClasses(*kinds, status)
        problem = found.problem()
    except (ImportError, AttributeError) as error:
        found, problem = None, str(error)
    if problem:
        logger.info("commext: shm_queue: steps are pickled as they are: %s", problem)
        return None
    return found


def create_from_process_group(
    pg: Any,
    max_chunk_bytes: int,
    max_chunks: int,
    writer_rank: int = 0,
    external_writer_handle: Handle | None = None,
    blocking: bool = True,
) -> MessageQueue:
    """Make a queue from `writer_rank` (of the group) to all other ranks; every rank calls this.

    `pg`: a torch ProcessGroup on the CPU, or vLLM's StatelessProcessGroup. With
    `external_writer_handle` (at the writer's rank) the writer is somebody outside of the group, and
    that rank becomes a reader as well. `blocking`: return when all are ready."""
    from vllm.distributed.parallel_state import in_the_same_node_as

    rank, world_size = _place(pg)
    same_node = in_the_same_node_as(pg, source_rank=writer_rank)
    if not all(same_node):
        if rank == writer_rank:
            logger.info(LEFT, "a group has ranks on other hosts")
        args = (max_chunk_bytes, max_chunks, writer_rank, external_writer_handle, blocking)
        return GroupMessageQueue.stock.create_from_process_group(pg, *args)
    if rank != writer_rank:
        queue = GroupMessageQueue.create_from_handle(_broadcast(pg, None, writer_rank), rank)
    elif external_writer_handle is not None:
        queue = GroupMessageQueue.create_from_handle(external_writer_handle, rank)
        _broadcast(pg, external_writer_handle, writer_rank)
    else:
        others = [other for other in range(world_size) if other != rank]
        queue = GroupMessageQueue(len(others), len(others), others, max_chunk_bytes, max_chunks)
        _broadcast(pg, queue.export_handle(), writer_rank)
    if blocking:
        queue.wait_until_ready()
    return queue


def create_from_process_group_single_reader(
    pg: Any, max_chunk_bytes: int, max_chunks: int, reader_rank: int = 0, blocking: bool = False
) -> tuple[MessageQueue, list[Handle]]:
    """Make a queue from every rank to one, `reader_rank` (of the world, not of the group).

    Returns this rank's queue, to write to, and at `reader_rank` the handles of all, else [].
    """
    rank, per_host = dist.get_rank(), _ranks_per_host()
    n_local = 1 if rank // per_host == reader_rank // per_host else 0
    queue = GroupMessageQueue(1, n_local, max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks)
    handles: list[Any] | None = [None] * dist.get_world_size(pg) if rank == reader_rank else None
    dist.gather_object(queue.export_handle(), handles, dst=reader_rank, group=pg)
    if blocking:
        queue.wait_until_ready()
    return queue, handles or []


def _ranks_per_host() -> int:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import get_assigned_physical_gpu_ids

    if (assigned := get_assigned_physical_gpu_ids()) is not None:
        return len(assigned)
    count: int = current_platform.device_count()  # pyright: ignore[reportOptionalCall]
    return count


def _place(pg: Any) -> tuple[int, int]:
    if not isinstance(pg, dist.ProcessGroup):
        return pg.rank, pg.world_size
    return dist.get_rank(pg), dist.get_world_size(pg)


def _broadcast(pg: Any, obj: Any, source: int) -> Any:
    """Return the `obj` of rank `source` of the group, at every rank."""
    if not isinstance(pg, dist.ProcessGroup):
        return pg.broadcast_obj(obj, source)
    holder = [obj]
    dist.broadcast_object_list(holder, src=dist.get_process_group_ranks(pg)[source], group=pg)
    return holder[0]


class GroupMessageQueue(MessageQueue):
    """`MessageQueue` with what only a process of vLLM's can do.

    Attributes:
        stock: vLLM's class, which has the queues with readers on other hosts, or with a tensor
            arena; set at install.
    """

    stock: ClassVar[Any] = None

    def __new__(cls, n_reader: int = 0, n_local_reader: int = 0, *args: Any, **more: Any) -> Any:
        """Make a queue of vLLM's class where ours does not serve."""
        if n_reader > n_local_reader or more.get("enable_shm_tensor_arena"):
            logger.info(LEFT, "a queue has readers on other hosts, or a tensor arena")
            return cls.stock(n_reader, n_local_reader, *args, **more)
        return super().__new__(cls)

    @classmethod
    def create_from_handle(cls, handle: Any, rank: int) -> Any:
        """Make the reading end for `rank` of a queue of either class."""
        from vllm.distributed.device_communicators import shm_broadcast

        if isinstance(handle, shm_broadcast.Handle):
            return cls.stock.create_from_handle(handle, rank)
        return super().create_from_handle(handle, rank)

    @staticmethod
    def step_classes() -> StepClasses | None:
        return vllm_steps()

    create_from_process_group = staticmethod(create_from_process_group)
    create_from_process_group_single_reader = staticmethod(create_from_process_group_single_reader)


def finding_itself(stock: type) -> type:
    """Copy vLLM's class so that its methods find it at its name, where its module has ours."""
    around = vars(sys.modules[stock.__module__])
    names = dict(around)

    def copied(value: Any) -> Any:
        if isinstance(value, staticmethod):
            return staticmethod(copied(value.__func__))
        if not isinstance(value, FunctionType) or value.__globals__ is not around:
            return value  # a wrapper that finds what it needs in the module that it is of
        copy = FunctionType(
            value.__code__, names, value.__name__, value.__defaults__, value.__closure__
        )
        copy.__kwdefaults__ = value.__kwdefaults__
        return copy

    methods = {name: copied(value) for name, value in vars(stock).items() if callable(value)}
    methods |= {"__module__": stock.__module__, "__doc__": stock.__doc__}
    names[stock.__name__] = made = type(stock.__name__, (stock,), methods)
    return made


def install() -> None:
    """Monkey-patch the class in this process; a queue with readers on other hosts is still one of
    vLLM's. UnsupportedError where the class was replaced already.

    The defining module is patched first, so whatever is imported later binds ours by itself; the
    two modules that may have bound the class before are patched if they are there."""
    symbol = f"{DEFINED_IN}:{NAME}"
    stock = original_of(symbol)
    if stock.__module__ != DEFINED_IN:
        raise UnsupportedError(f"vLLM's queue was replaced by {stock.__module__} already")
    if is_patched(symbol):
        return
    GroupMessageQueue.stock = finding_itself(stock)
    symbols = [symbol for symbol in SYMBOLS if symbol.endswith(f":{NAME}")]
    modules = {symbol: sys.modules.get(symbol.partition(":")[0]) for symbol in symbols}
    bound = [symbol for symbol, module in modules.items() if getattr(module, NAME, None) is stock]
    patch(dict.fromkeys(bound, GroupMessageQueue))
