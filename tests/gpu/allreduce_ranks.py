"""One rank of the all-reduce checks on GPUs; test_allreduce.py starts one a GPU.

    python tests/gpu/allreduce_ranks.py RANK WORLD_SIZE PORT [CHECK ...]

Every rank runs the same checks in the same order and after each tells the others how it went. Rank
0 prints a line of JSON a check: its name, the seconds it took, figures, and each rank's error."""

import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.kit.gpu_ranks import checks_of, run_checks
from vllm_commext.allreduce import flashinfer, limits, machine
from vllm_commext.allreduce.creation import Parts, create_dispatcher
from vllm_commext.allreduce.dispatcher import Dispatcher
from vllm_commext.allreduce.flashinfer import MEASURING_BYTES
from vllm_commext.allreduce.limits import Message
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.collective import Collective
from vllm_commext.compat.tp_group import tensor_parallel

MIB = 1 << 20
# Half a unit in the last place of numbers from 1 to 2.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
MANY_CALLS = 10000
MANY_REPLAYS = 10000
Figures = dict[str, Any]


class Sum:
    """One tensor a rank, the same numbers on every rank, and their sum."""

    def __init__(self, seed: int, shape: Sequence[int], dtype: torch.dtype, world: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.parts = [
            torch.randn(tuple(shape), generator=generator, device="cuda").to(dtype)
            for _ in range(world)
        ]
        wide = [part.double() for part in self.parts]
        self.want = torch.stack(wide).sum(0) if wide else torch.zeros(())
        # Each of the world's roundings is at most half a unit of what has been added up so far.
        largest = torch.stack([part.abs() for part in wide]).sum(0)
        self.bound = world * ROUNDOFF[dtype] * largest + 1e-30

    def errors(self, out: torch.Tensor) -> torch.Tensor:
        assert out.shape == self.want.shape
        return ((out.double() - self.want).abs() > self.bound).sum()


class Rank:
    def __init__(self, group: Any) -> None:
        self.group, self.communicator = group, group.device_communicator
        self.rank, self.world = group.rank_in_group, group.world_size
        made = self.communicator
        custom = made.ca_comm if made.ca_comm is not None and not made.ca_comm.disabled else None
        self.parts = Parts(made.cpu_group, made.device_group, made.device, custom, made.pynccl_comm)
        self.collective = Collective.over(made.cpu_group)
        self.dispatcher = create_dispatcher(self.parts, None, wanted=limits.BACKENDS)

    def table(self) -> Table:
        """A table under which every backend comes first somewhere."""
        made = list(self.dispatcher.backends)
        bounds = [*((4 << 10) * 4**step for step in range(len(made) - 1)), 1 << 30]
        rows = tuple(
            Row(bound, tuple(made[turn:] + made[:turn])) for turn, bound in enumerate(bounds)
        )
        return Table(self.world, dict.fromkeys(("bfloat16", "float16", "float32"), rows), "test")

    def use(self, table: Table) -> None:
        backends = list(self.dispatcher.backends.values())
        self.dispatcher = Dispatcher(backends, self.world, table)

    def sum(self, seed: int, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Sum:
        return Sum(seed, shape, dtype, self.world)


def shapes() -> list[tuple[int, ...]]:
    return [
        *((1, 8), (1, 4096), (3, 2880), (17, 7168), (64, 8192), (333, 5120), (1, 1), (5, 7)),
        *((8192,), (1,), (7,), (2, 3, 64), (4, 1, 4096), (3, 8 * 1031), (0, 4096), (0,)),
    ]


def check_every_backend(rank: Rank) -> Figures:
    """Each by itself, at every shape and dtype that it takes, twice with the same bits."""
    figures: Figures = {}
    for name, backend in rank.dispatcher.backends.items():
        taken = 0
        for index, shape in enumerate([*shapes(), (2048, 4096), (4096, 8192), (30000,)]):
            for dtype in ROUNDOFF:
                message = Message(shape, str(dtype).removeprefix("torch."))
                if not message.num_elements or not backend.takes(message):
                    continue
                backend.prepare(message)
                if not backend.is_ready(message) or not backend.takes(message):
                    continue
                case = rank.sum(index, shape, dtype)
                tensor = case.parts[rank.rank]
                kept = tensor.clone()
                outs = [backend.all_reduce(tensor) for _ in range(2)]
                assert int(case.errors(outs[0])) == 0, (name, shape, dtype)
                assert torch.equal(outs[0], outs[1]), (name, shape, dtype)
                assert torch.equal(tensor, kept), (name, shape, dtype)
                assert outs[0].data_ptr() not in (tensor.data_ptr(), outs[1].data_ptr())
                taken += 1
        figures[name] = taken
        assert taken, f"{name} took nothing"
    return figures


def check_many_calls(rank: Rank) -> Figures:
    """Back to back, random sizes and dtypes, with ranks that come late at random."""
    rank.use(rank.table())
    numbers, mine = random.Random(7), random.Random(100 + rank.rank)
    pool = [
        rank.sum(index, shape, dtype)
        for index, shape in enumerate([(1, 4096), (5, 4096), (64, 4096), (300, 8192), (2049,)])
        for dtype in ROUNDOFF
    ]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    start = time.monotonic()
    for call in range(MANY_CALLS):
        case = pool[numbers.randrange(len(pool))]
        if mine.random() < 0.01:
            torch.cuda._sleep(mine.randrange(200000))
        out = rank.dispatcher.all_reduce(case.parts[rank.rank])
        assert out is not None
        if call % 8 == 0:
            wrong += case.errors(out)
    assert int(wrong) == 0, f"{int(wrong)} elements are wrong"
    seconds = round(time.monotonic() - start, 2)
    return {"calls": MANY_CALLS, "seconds": seconds, "by": dict(rank.dispatcher.counts()[0])}


def check_graphs(rank: Rank) -> Figures:
    """Replays of several graphs, in an order that is random but the same, with eager calls."""
    rank.use(rank.table())
    cases = [
        rank.sum(index, (rows, 4096)) for index, rows in enumerate((1, 4, 32, 200, 1500, 5000))
    ]
    for case in cases:
        rank.dispatcher.all_reduce(case.parts[rank.rank])
    graphs: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []
    inputs = [torch.empty_like(case.parts[rank.rank]) for case in cases]
    with rank.group.graph_capture() as context:
        for tensor in inputs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=context.stream):
                out = rank.dispatcher.all_reduce(tensor)
                out = rank.dispatcher.all_reduce(tensor)
            assert out is not None
            graphs.append((graph, out))
    numbers = random.Random(11)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(MANY_REPLAYS):
        index = numbers.randrange(len(cases))
        case = cases[index]
        if numbers.random() < 0.3:
            eager = rank.dispatcher.all_reduce(case.parts[rank.rank])
            assert eager is not None
            wrong += case.errors(eager)
        else:
            inputs[index].copy_(case.parts[rank.rank])
            graphs[index][0].replay()
            wrong += case.errors(graphs[index][1])
            inputs[index].zero_()
    assert int(wrong) == 0, f"{int(wrong)} elements are wrong"
    return {"replays and calls": MANY_REPLAYS}


def check_create_and_destroy(rank: Rank) -> Figures:
    free: list[int] = []
    for _ in range(4):
        made: Dispatcher = create_dispatcher(rank.parts, rank.table())
        case = rank.sum(5, (3, 4096))
        out = made.all_reduce(case.parts[rank.rank])
        assert out is not None
        assert int(case.errors(out)) == 0
        torch.cuda.synchronize()
        rank.collective.run(lambda: None)
        names_made = set(made.backends)
        made.destroy()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
        assert names_made == set(rank.dispatcher.backends)
    # FlashInfer's workspaces are the group's: ours has given back those of `rank.dispatcher` too.
    lost = free[0] - free[-1]
    assert lost < 64 * MIB, f"{lost >> 20} MiB are lost"
    return {"lost_mib": lost / MIB}


def check_no_multicast(rank: Rank) -> Figures:
    """Of all that was done before: no multicast function of the driver was called."""
    if COUNTER is None:
        return {"skipped": f"CUPTI cannot count: {COUNTER_PROBLEM}"}
    counted = dict(COUNTER.counts)
    COUNTER.control()
    assert sum(COUNTER.counts.values()) == sum(counted.values()) + 1, "the counter does not count"
    assert not counted, f"called: {counted}"
    return {"functions watched": len(COUNTER._names), "rank": rank.rank}


CHECKS: dict[str, Callable[[Rank], Figures]] = checks_of(globals())
COUNTER: Any = None
COUNTER_PROBLEM = ""


def start_counter() -> None:
    """Watch the driver from before the first library talks to it."""
    global COUNTER, COUNTER_PROBLEM
    path = Path(__file__).with_name("multicast_calls.py")
    spec = importlib.util.spec_from_file_location("multicast_calls", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        COUNTER = module.MulticastCalls()
    except (OSError, RuntimeError, AttributeError) as error:
        COUNTER_PROBLEM = str(error)


def main() -> None:
    rank, world, port = (int(text) for text in sys.argv[1:4])
    machine.keep_off_multicast()
    start_counter()
    flashinfer.shared.budget_bytes = MEASURING_BYTES
    with tensor_parallel(rank, world, port) as group, torch.inference_mode():
        made = Rank(group)
        run_checks(made, CHECKS, sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
