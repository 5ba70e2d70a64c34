"""Times of the backends on this machine: chained calls in CUDA graphs, of which the ranks take
turns to be slowest. Needs GPUs."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.dispatcher import Dispatcher
from vllm_commext.allreduce.limits import Message, message_of_bytes
from vllm_commext.allreduce.table import median_of_slowest
from vllm_commext.collective import Collective

if TYPE_CHECKING:
    import torch

Call = Callable[["torch.Tensor"], Any]
Norm = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", float], None]
"""Adds a tensor to the residual, both [rows, hidden], and makes it the norm of that, in place."""
Fused = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", float], Any]
"""Takes this rank's part of the sum, residual, weight and epsilon; returns new tensors."""

BASELINE = "matrix product alone"
COPIES = 4  # of the matrix, so that none is in the cache when its turn comes
EPS = 1e-5
SMALLEST = 0.1  # microseconds, of a difference of two medians
KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(2 * KIB << step for step in range(16))  # 2 KiB to 64 MiB
CaptureContext = Callable[[], AbstractContextManager[Any]]
TimesBySize = dict[int, dict[str, float]]


class Neighbours:
    """The matrix product before the all-reduce of a message, and the residual and norm after it.

    A chain of all-reduces alone favours kernels that begin before their predecessor has ended, and
    finds in the caches what a model finds in memory. The product contracts half as many elements as
    a row of the message has."""

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
        """Multiply the tensor's first columns with another matrix each time."""
        from torch.nn.functional import linear

        self._turn += 1
        return linear(tensor[:, : self._inner], self._matrices[self._turn % COPIES])

    def apart(self, all_reduce: Call) -> Call:
        def call(tensor: "torch.Tensor") -> Any:
            out = all_reduce(self.product(tensor))
            self._norm(out, self._residual, self._weight, EPS)
            return out

        return call

    def together(self, fused: Fused) -> Call:
        return lambda tensor: fused(self.product(tensor), self._residual, self._weight, EPS)

    def calls(self, backends: Mapping[str, Call], fused: Mapping[str, Fused]) -> dict[str, Call]:
        made = {name: self.apart(call) for name, call in backends.items()}
        made |= {name: self.together(call) for name, call in fused.items()}
        return {BASELINE: self.product, **made}


def without_product(times: Mapping[str, float]) -> dict[str, float]:
    alone = times.get(BASELINE, 0.0)
    return {name: max(of - alone, SMALLEST) for name, of in times.items() if name != BASELINE}


def fused_calls(
    dispatcher: Dispatcher, collective: "Collective", message: Message
) -> dict[str, Fused]:
    from vllm_commext.allreduce.flashinfer import FlashInferBackend
    from vllm_commext.allreduce.fused.kernels import FusedKernels, Operands, PushFused
    from vllm_commext.allreduce.fused.layout import FusedShape
    from vllm_commext.allreduce.fused.op import is_prepared
    from vllm_commext.allreduce.push import PushBackend

    found: dict[str, Fused] = {}
    rows, hidden = message.shape
    shape = FusedShape(message.dtype, message.dtype, hidden)
    push = dispatcher.backends.get(limits.PUSH)
    if isinstance(push, PushBackend):
        ours = PushFused(FusedKernels(push.memory, collective), collective.world_size)
        if is_prepared(ours, shape) and ours.takes(shape, rows):
            found[limits.FUSED_PUSH] = lambda x, residual, weight, eps: ours.run(
                Operands(shape, x, residual, weight, eps)
            )
    theirs = dispatcher.backends.get(limits.FLASHINFER_ONE_SHOT)
    # In float32 it has ended with an illegal memory access.
    if isinstance(theirs, FlashInferBackend) and message.dtype != "float32":
        theirs.prepare(message)
        if theirs.is_ready(message) and theirs.takes(message):
            found[limits.FUSED_FLASHINFER] = theirs.add_norm
    return found


class Options(msgspec.Struct, frozen=True):
    """Options of a measurement: `sizes` in bytes, `hidden` elements a row, interleaved `samples` of
    each backend and size, `replays` of a graph a sample; no size begins after `seconds`."""

    sizes: tuple[int, ...] = SIZES
    dtypes: tuple[str, ...] = ("bfloat16",)
    hidden: int = 8192
    samples: int = 21
    replays: int = 5
    seconds: float = 540.0


def spread(sizes: Sequence[int]) -> list[int]:
    """Order the sizes so that every beginning is spread over all of them."""
    ordered = sorted(sizes)
    steps = [step for step in (8, 4, 2, 1) if step < len(ordered)] or [1]
    picked = [ordered[-1], *(size for step in steps for size in ordered[::step])]
    return list(dict.fromkeys(picked))


def chained_calls(num_bytes: int) -> int:
    """Calls in one graph: enough that launching it does not show, and no more than needed."""
    return 32 if num_bytes <= MIB else 16 if num_bytes <= 8 * MIB else 8


def capture(
    call: Call, tensor: "torch.Tensor", chained: int, context: CaptureContext
) -> "torch.cuda.CUDAGraph":
    import torch

    for _ in range(3):
        call(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with context(), torch.cuda.graph(graph):
        for _ in range(chained):
            call(tensor)
    return graph


def replay_seconds(graph: "torch.cuda.CUDAGraph", replays: int, collective: Collective) -> float:
    """Seconds of one replay, once the ranks have met in another."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    collective.run(lambda: None)
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / replays


def measure_message(
    calls: Mapping[str, Call],
    message: Message,
    options: Options,
    collective: Collective,
    context: CaptureContext = nullcontext,
) -> dict[str, float]:
    """Microseconds a call of each variant: the median over samples of the slowest rank.

    The variants take turns in every sample, so that what else the machine does meets all."""
    import torch

    if not calls:
        return {}
    tensor = torch.rand(message.shape, device="cuda").to(getattr(torch, message.dtype))
    chained = chained_calls(message.num_bytes)
    graphs = {name: capture(call, tensor, chained, context) for name, call in calls.items()}
    mine: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(options.samples):
        for name, graph in graphs.items():
            seconds = replay_seconds(graph, options.replays, collective)
            mine[name].append(seconds / chained * 1e6)
    everybody = collective.run(lambda: mine)
    return {name: median_of_slowest([rank[name] for rank in everybody]) for name in graphs}


def give_back_memory() -> None:
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def backend_calls(dispatcher: Dispatcher, message: Message) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name, backend in dispatcher.backends.items():
        if backend.takes(message):
            backend.prepare(message)
            if backend.is_ready(message) and backend.takes(message):
                calls[name] = backend.all_reduce
    return calls


def measure_backends(
    dispatcher: Dispatcher,
    collective: Collective,
    options: Options,
    context: CaptureContext = nullcontext,
    progress: Callable[[str, int, Mapping[str, float]], None] | None = None,
    norm: Norm | None = None,
) -> dict[str, TimesBySize]:
    """Measure every backend at every size, until the time is over; the same on all ranks.

    Args:
        progress: called with each dtype, size and its times.
        norm: measure all-reduces after a matrix product and before this norm, and with them who
            serves both in one launch; None for chains of all-reduces alone.

    Returns:
        By dtype and size, the microseconds of each backend, without the product.
    """
    end = time.monotonic() + options.seconds
    times: dict[str, TimesBySize] = {dtype: {} for dtype in options.dtypes}
    for size in spread(options.sizes):
        for dtype in options.dtypes:
            if not all(collective.run(lambda: time.monotonic() < end)):
                return times
            message = message_of_bytes(size, dtype, options.hidden)
            calls = backend_calls(dispatcher, message)
            if norm is not None and len(message.shape) == 2:
                fused = fused_calls(dispatcher, collective, message)
                calls = Neighbours(message, norm).calls(calls, fused)
            found = measure_message(calls, message, options, collective, context)
            if norm is not None:
                found = without_product(found)
                give_back_memory()
            times[dtype][size] = found
            if progress is not None:
                progress(dtype, size, found)
    return times
