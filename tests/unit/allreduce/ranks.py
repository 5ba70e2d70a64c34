"""One rank of the two-rank checks over gloo; test_ranks.py starts it.

    python tests/unit/allreduce/ranks.py RANK WORLD_SIZE STORE_FILE

Prints a line of JSON a check: its name, and what the rank found.
"""

import json
import random
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from vllm_commext.allreduce import creation, limits
from vllm_commext.allreduce.backends import flashinfer as backend_module
from vllm_commext.allreduce.backends.backend import NcclBackend, Ready
from vllm_commext.allreduce.backends.flashinfer import WorkspaceKey, Workspaces
from vllm_commext.allreduce.creation import (
    Parts,
    Requirements,
    create_dispatcher,
    lines,
    start_dispatcher,
)
from vllm_commext.allreduce.limits import Message
from vllm_commext.allreduce.table import cache
from vllm_commext.allreduce.table.machine import Machine
from vllm_commext.allreduce.table.table import Row, Table
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu.facts import Facts, agree_about

CPU = torch.device("cpu")


class StandIn(Ready):
    """Sums over gloo and writes down what it was given."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def takes(self, message: Message) -> bool:
        return message.num_elements > 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._log.append(self.name)
        out = tensor.clone()
        distributed.all_reduce(out)
        return out

    def destroy(self) -> None:
        self._log.append(f"destroy {self.name}")


def raised(step: Callable[[], object]) -> str:
    try:
        step()
    except UnsupportedError as error:
        return str(error)
    return ""


def check_values(rank: int, world: int) -> Any:
    collective = Collective.over(distributed.group.WORLD)
    return {
        "run": collective.run(lambda: rank * 10),
        "inside": collective.run(lambda: (collective.allgather(rank), collective.bcast(rank, 1))),
        "split": collective.run(lambda: collective.Split(0, rank) is collective),
        "other_split": raised(lambda: collective.run(lambda: collective.Split(rank, 0))),
        "world": world,
    }


def check_failures(rank: int, _: int) -> Any:
    """At each of four points rank 1 fails; both leave with the same words, and can go on."""
    collective = Collective.over(distributed.group.WORLD)
    found: list[str] = []
    for at in range(4):

        def step(at: int = at) -> None:
            for turn in range(4):
                if rank == 1 and turn == at:
                    raise ValueError(f"at {at}")
                if turn < 3:
                    collective.allgather(turn)

        found.append(raised(lambda: collective.run(step)))
        found.append(str(collective.run(lambda at=at: at)))

    def uneven() -> None:
        for _ in range(1 + rank):
            collective.barrier()

    found.append(raised(lambda: collective.run(uneven)))
    with torch.inference_mode():
        found.append(str(collective.run(lambda: "in inference mode")))
    return found


def check_creation(rank: int, world: int) -> Any:
    """One rank cannot make one family: none has it, and the next backend serves on both."""
    log: list[str] = []
    rows = (Row(1 << 20, (limits.FLASHINFER_ONE_SHOT, limits.CUSTOM, limits.NCCL)),)
    table = Table(world, {"float32": rows}, f"of rank {rank}")

    def make(*_: Any) -> StandIn:
        if rank == 1:
            raise UnsupportedError("no compiler")
        return StandIn(limits.FLASHINFER_ONE_SHOT, log)

    creation.flashinfer.FlashInferBackend = make  # pyright: ignore
    parts = Parts(distributed.group.WORLD, distributed.group.WORLD, CPU)
    dispatcher = create_dispatcher(parts, table)
    out = dispatcher.all_reduce(torch.ones(4))
    assert out is not None
    served, refused = dispatcher.counts()
    assert dispatcher.table is not None
    other = raised(lambda: create_dispatcher(parts, table, limits.BACKENDS[rank]))
    return {
        "backends": sorted(dispatcher.backends),
        "sum": out.tolist(),
        "served": dict(served),
        "refused": dict(refused),
        "origin": dispatcher.table.origin,
        "other_settings": other,
    }


def check_facts(rank: int, world: int) -> Any:
    """Agreed by all; refused on all where they are on two hosts, differ, or one cannot say."""
    ranks = Collective.over(distributed.group.WORLD)

    def broken() -> Facts:
        if rank == 1:
            raise OSError("no driver")
        return Facts()

    unlike = Facts(settings=("VLLM_COMMEXT_ALLREDUCE_TUNE=" + ("cached", "0")[rank],))
    return {
        "alike": agree_about(lambda: Facts("one", hidden=64), ranks).hidden,
        "two hosts": raised(lambda: agree_about(lambda: Facts(f"host {rank}"), ranks)),
        "unlike": raised(lambda: agree_about(lambda: unlike, ranks)),
        "dtypes": raised(lambda: agree_about(lambda: Facts(hidden=64 + rank), ranks)),
        "broken": raised(lambda: agree_about(broken, ranks)),
    }


def check_workspace(rank: int, world: int) -> Any:
    """A library that creates in several exchanges, and on rank 1 fails between two of them."""
    backend_module._check_memory = lambda _: None
    released: list[str] = []
    states: list[bool] = []

    def create(key: WorkspaceKey, _: Any, rows: int, collective: Collective, __: Any) -> str:
        handles = collective.allgather(f"handle {rank}")
        if rank == 1 and key.hidden == 16:
            raise MemoryError("out of memory")
        collective.barrier()
        return f"{rows} {handles}"

    backend_module._create = create
    backend_module._release = released.append
    workspaces = Workspaces(budget_bytes=1 << 20)
    group = distributed.group.WORLD
    found: list[Any] = []
    for hidden in (16, 8, 16, 8, 64):
        before = random.getstate()
        key = WorkspaceKey("tp", False, hidden)
        made = workspaces.get_or_create(
            key, torch.bfloat16, 1 << 18 if hidden == 8 else 4096, group
        )
        states.append(random.getstate() == before)
        found.append(made and [made.handle, made.size.max_bytes])
    bytes_before = workspaces.device_bytes
    workspaces.destroy("another")
    workspaces.destroy()
    return [found, bytes_before, len(released), workspaces.device_bytes, all(states), world]


def check_nccl_through_torch(rank: int, _: int) -> Any:
    backend = NcclBackend(None, distributed.group.WORLD)
    tensor = torch.full((3,), float(rank + 1))
    return [backend.through, backend.all_reduce(tensor).tolist(), tensor.tolist()]


def check_creation_that_ends_midway(_: int, world: int) -> Any:
    """What was made before a maker that raises what nobody expects is given back."""
    log: list[str] = []
    rows = (Row(1 << 10, (limits.FLASHINFER_ONE_SHOT,)), Row(1 << 20, (limits.PUSH,)))
    table = Table(world, {"float32": rows}, "test")
    creation.flashinfer.FlashInferBackend = lambda *_: StandIn(limits.FLASHINFER_ONE_SHOT, log)  # pyright: ignore

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    made, creation.push.PushBackend = creation.push.PushBackend, fail
    group = distributed.group.WORLD
    try:
        create_dispatcher(Parts(group, group, CPU), table)
    except KeyboardInterrupt:
        return log
    finally:
        creation.push.PushBackend = made
    return "no error"


def by_itself_where(parts: Parts, unknown: Machine, sizes: list[int]) -> dict[str, Any]:
    """What takes part where nobody has asked for it, and with how much memory."""
    start, few = start_dispatcher, Facts(hidden=4096, max_tokens=1024)
    known = Machine("NVIDIA H200", "", "", "", "", "", "")
    without_gain = start(parts, Requirements(by_itself=True, facts=few), lambda: known)
    real, cache.IN_ENGINES = cache.IN_ENGINES, frozenset({("NVIDIA H200", 2)})
    sizes.clear()
    made = start(parts, Requirements(by_itself=True, facts=few), lambda: known)
    assert made is not None
    rows = [torch.ones(count, 4096, dtype=torch.bfloat16) for count in (1, 64, 512, 1024)]
    found: dict[str, Any] = {
        "by itself": [made.choice(each) for each in (*rows, rows[3].float())],
        "by itself, backends": sorted(made.backends),
        "by itself, bytes": list(sizes),
        "by itself, lines": lines(made, Requirements(by_itself=True, facts=few)),
    }
    for what, facts, machine in (
        ("an unknown machine", Facts(), unknown),
        ("another dtype", Facts(dtype="float64"), known),
        ("multicast", Facts(multicast=True), known),
        ("eager", Facts(eager=True), known),
        ("microbatches", Facts(microbatches=True), known),
        ("invariance", Facts(multicast=True, invariant=True), known),
    ):
        required = Requirements(by_itself=True, facts=facts)
        found[f"by itself, {what}"] = (
            start(parts, required, lambda machine=machine: machine) is None
        )
    cached = Requirements(by_itself=True, facts=Facts(hidden=64))
    elsewhere = Table(2, {"bfloat16": (Row(1 << 20, (limits.NCCL, limits.PUSH)),)}, "tuned")
    if distributed.get_rank() == 0:
        cache.save(unknown, elsewhere, 64)
    distributed.barrier()
    found["by itself, never first"] = start(parts, cached, lambda: unknown) is None
    found["by itself, GPUs without gain in engines"] = without_gain is None
    cache.IN_ENGINES = real
    return found


def check_start(rank: int, world: int) -> Any:
    """As an engine starts: unknown, with the built-in table, with a fault on one rank, measured."""
    group = distributed.group.WORLD
    parts = Parts(group, group, CPU)
    unknown = Machine("another GPU", "", "", "", "", "", "")
    known = Machine("NVIDIA H200", "", "", "", "", "", "")
    found: dict[str, Any] = {
        "unknown": start_dispatcher(parts, Requirements(), lambda: unknown) is None
    }
    made = start_dispatcher(parts, Requirements(), lambda: known if rank == 0 else unknown)
    assert made.table is not None
    out = made.all_reduce(torch.ones(8, dtype=torch.bfloat16))
    found["built in"] = [list(made.backends), made.table.origin, out is not None and out.tolist()]
    found["lines"] = lines(made, Requirements())
    forced = start_dispatcher(parts, Requirements(forced=limits.NCCL), lambda: unknown)
    found["forced"] = forced.all_reduce(torch.ones(2)) is not None

    def broken() -> Machine:
        if rank == 1:
            raise OSError("no driver")
        return known

    eager, split = Facts(eager=True), Facts(microbatches=True)
    found["eager"] = start_dispatcher(parts, Requirements(facts=eager), lambda: known) is None
    found["eager, forced"] = (
        start_dispatcher(parts, Requirements(limits.NCCL, facts=eager), lambda: known) is not None
    )
    found["microbatches"] = (
        start_dispatcher(parts, Requirements(facts=split), lambda: known) is None
    )
    same = Facts(invariant=True)
    invariant = Requirements(facts=same)
    found["invariant, without our kernel"] = start_dispatcher(parts, invariant, lambda: known)
    by_itself = Requirements(by_itself=True)
    found["by itself, without our kernel"] = start_dispatcher(parts, by_itself, lambda: known)
    real, sizes = creation.push.PushBackend, []

    def push_backend(num_bytes: int, _: Any) -> StandIn:
        sizes.append(num_bytes)
        return StandIn(limits.PUSH, [])

    creation.push.PushBackend = push_backend  # pyright: ignore
    ours = start_dispatcher(parts, invariant, lambda: known)
    assert ours is not None
    found["invariant"] = sorted({ours.choice(torch.ones(rows, 8)) for rows in (1, 2, 9, 1 << 15)})
    found["invariant, unknown"] = start_dispatcher(parts, invariant, lambda: unknown)
    other = Requirements(limits.NCCL, facts=same)
    found["invariant, forced"] = start_dispatcher(parts, other, lambda: known)
    found.update(by_itself_where(parts, unknown, sizes))
    creation.push.PushBackend = real
    found["broken"] = raised(lambda: start_dispatcher(parts, Requirements(), broken))
    return found


CHECKS: dict[str, Callable[[int, int], Any]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    distributed.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=60), world_size=world, rank=rank
    )
    for name, check in CHECKS.items():
        try:
            found = check(rank, world)
        except Exception:  # noqa: BLE001 - the test shows it
            found = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps({"check": name, "found": found}) + "\n")
        sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
