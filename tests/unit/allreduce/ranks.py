"""One rank of the two-rank checks over gloo; test_ranks.py starts it.

    python tests/unit/allreduce/ranks.py RANK STORE_FILE

Prints a line of JSON a check: its name, and the error it ended with, if any."""

import json
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from vllm_commext.allreduce import creation, limits
from vllm_commext.allreduce import flashinfer as backend_module
from vllm_commext.allreduce.backend import Ready
from vllm_commext.allreduce.creation import (
    Facts,
    Parts,
    Requirements,
    create_dispatcher,
    lines,
    start_dispatcher,
)
from vllm_commext.allreduce.dispatcher import Dispatcher
from vllm_commext.allreduce.flashinfer import WorkspaceKey, Workspaces
from vllm_commext.allreduce.limits import Message
from vllm_commext.allreduce.machine import Machine
from vllm_commext.allreduce.table import Row, Table
from vllm_commext.collective import Collective
from vllm_commext.compat.tp_group import agree_about
from vllm_commext.errors import UnsupportedError

CPU = torch.device("cpu")
WORLD = 2
KNOWN = Machine("NVIDIA H200", "", "", "", "", "", "")
UNKNOWN = Machine("another GPU", "", "", "", "", "", "")


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


def parts() -> Parts:
    return Parts(distributed.group.WORLD, distributed.group.WORLD, CPU)


def start(machine: Machine, forced: str | None = None, **facts: Any) -> Dispatcher | None:
    return start_dispatcher(parts(), Requirements(forced, facts=Facts(**facts)), lambda: machine)


def check_objects_travel(rank: int, _: pytest.MonkeyPatch) -> None:
    collective = Collective.over(distributed.group.WORLD)
    assert collective.run(lambda: rank * 10) == [0, 10]
    both = collective.run(lambda: (collective.allgather(rank), collective.bcast(rank, 1)))
    assert both == [((0, 1), 1)] * WORLD
    assert collective.run(lambda: collective.Split(0, rank) is collective) == [True] * WORLD
    with pytest.raises(UnsupportedError, match="expected one colour"):
        collective.run(lambda: collective.Split(rank, 0))


def check_a_failure_at_any_point_is_everybodys(rank: int, _: pytest.MonkeyPatch) -> None:
    collective = Collective.over(distributed.group.WORLD)
    for at in range(4):

        def step(at: int = at) -> None:
            for turn in range(4):
                if rank == 1 and turn == at:
                    raise ValueError(f"at {at}")
                if turn < 3:
                    collective.allgather(turn)

        with pytest.raises(UnsupportedError, match=f"^rank 1: ValueError: at {at}$"):
            collective.run(step)
        assert collective.run(lambda at=at: at) == [at] * WORLD  # both can go on

    def uneven() -> None:
        for _ in range(1 + rank):
            collective.barrier()

    with pytest.raises(UnsupportedError, match="different numbers of steps"):
        collective.run(uneven)
    with torch.inference_mode():
        assert collective.run(lambda: "in inference mode") == ["in inference mode"] * WORLD


def check_a_backend_that_fails_on_one_rank_is_nowhere(rank: int, patch: pytest.MonkeyPatch) -> None:
    """The next backend serves on both."""
    ranking = limits.FLASHINFER_ONE_SHOT, limits.CUSTOM, limits.NCCL
    rows = Row(8, ranking[1:]), Row(1 << 20, ranking)
    table = Table(WORLD, {"float32": rows}, f"of rank {rank}")

    def make(*_: Any) -> StandIn:
        if rank == 1:
            raise UnsupportedError("no compiler")
        return StandIn(limits.FLASHINFER_ONE_SHOT, [])

    said: list[str] = []
    patch.setattr(creation.flashinfer, "FlashInferBackend", make)
    patch.setattr(creation.logger, "warning", lambda text, *told: said.append(text % told))
    dispatcher = create_dispatcher(replace(parts(), custom=(object(), None)[rank]), table)
    ends = [" rank 1: UnsupportedError: vLLM has none", " rank 1: UnsupportedError: no compiler"]
    assert [one[one.rindex(" rank") :] for one in said] == (ends if rank == 0 else [])
    out = dispatcher.all_reduce(torch.ones(4))
    assert out is not None
    assert out.tolist() == [2.0] * 4
    assert list(dispatcher.backends) == ["nccl"]
    served, refused = dispatcher.counts()
    assert (served, refused) == ({"nccl": 1}, {"flashinfer_one_shot": 1, "custom": 1})
    assert dispatcher.table is not None
    assert dispatcher.table.origin == "of rank 0"
    with pytest.raises(UnsupportedError, match="expected the same settings on all ranks"):
        create_dispatcher(parts(), table, limits.BACKENDS[rank])


def check_what_decides_is_agreed_about_by_all_ranks(rank: int, __: pytest.MonkeyPatch) -> None:
    ranks = Collective.over(distributed.group.WORLD)

    def broken() -> Facts:
        if rank == 1:
            raise OSError("no driver")
        return Facts()

    assert agree_about(lambda: Facts("one", hidden=64), ranks).hidden == 64
    unlike = Facts(settings=("VLLM_COMMEXT_ALLREDUCE_TUNE=" + ("cached", "0")[rank],))
    for find, words in (
        (lambda: Facts(f"host {rank}"), "^its ranks are on 2 hosts$"),
        (lambda: unlike, "settings.*set the toggles alike"),
        (lambda: Facts(hidden=64 + rank), r"hidden \[64, 65\]"),
        (broken, "^rank 1: OSError: no driver$"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            agree_about(find, ranks)


def check_a_workspace_is_made_on_all_ranks_or_on_none(rank: int, patch: pytest.MonkeyPatch) -> None:
    """A library that creates in several exchanges, and on rank 1 fails between two of them."""
    released: list[str] = []

    def create(key: WorkspaceKey, _: Any, rows: int, collective: Collective, __: Any) -> str:
        handles = collective.allgather(f"handle {rank}")
        if rank == 1 and key.hidden == 16:
            raise MemoryError("out of memory")
        collective.barrier()
        return f"{rows} {handles}"

    patch.setattr(backend_module, "_check_memory", lambda _: None)
    patch.setattr(backend_module, "_create", create)
    patch.setattr(backend_module, "_release", released.append)
    workspaces = Workspaces(budget_bytes=1 << 20)
    found: list[Any] = []
    for hidden in (16, 8, 16, 8, 64):
        before = random.getstate()
        key, num_bytes = WorkspaceKey("tp", False, hidden), 1 << 18 if hidden == 8 else 4096
        group = distributed.group.WORLD
        found.append(workspaces.get_or_create(key, torch.bfloat16, num_bytes, group))
        assert random.getstate() == before
    assert found[0] is found[2] is None
    assert found[1] is found[3]
    assert found[1].handle.endswith("('handle 0', 'handle 1')")
    assert found[4] is None  # the one before has used the budget up
    assert 0 < workspaces.device_bytes <= 1 << 20
    workspaces.destroy("another")
    assert not released
    workspaces.destroy()
    assert (len(released), workspaces.device_bytes) == (1, 0)


def check_a_creation_that_ends_midway_leaves_nothing_behind(
    _: int, patch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    rows = (Row(1 << 10, (limits.FLASHINFER_ONE_SHOT,)), Row(1 << 20, (limits.PUSH,)))

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    made = StandIn(limits.FLASHINFER_ONE_SHOT, log)
    patch.setattr(creation.flashinfer, "FlashInferBackend", lambda *_: made)
    patch.setattr(creation.push, "PushBackend", fail)
    with pytest.raises(KeyboardInterrupt):
        create_dispatcher(parts(), Table(WORLD, {"float32": rows}, "test"))
    assert log == ["destroy flashinfer_one_shot"]


def check_a_group_starts_with_what_is_known_of_rank_0s_machine(
    rank: int, patch: pytest.MonkeyPatch
) -> None:
    assert start(UNKNOWN) is None
    made = start(KNOWN if rank == 0 else UNKNOWN)
    assert made is not None
    assert made.table is not None
    out = made.all_reduce(torch.ones(8, dtype=torch.bfloat16))
    assert out is not None
    assert out.tolist() == [2.0] * 8
    assert (list(made.backends), made.table.origin) == (["nccl"], "built in, 2 x NVIDIA H200")
    first, second, *_ = lines(made, Requirements())
    assert first == "made on all ranks: nccl"
    assert second.startswith("bfloat16: flashinfer_one_shot up to ")
    forced = start(UNKNOWN, limits.NCCL)
    assert forced is not None
    assert forced.all_reduce(torch.ones(2)) is not None
    assert start(KNOWN, eager=True) is start(KNOWN, microbatches=True) is None
    assert start(KNOWN, limits.NCCL, eager=True) is not None

    patch.setattr(creation.push, "PushBackend", lambda *_: StandIn(limits.PUSH, []))
    assert start(UNKNOWN, invariant=True) is start(KNOWN, limits.NCCL, invariant=True) is None

    def broken() -> Machine:
        if rank == 1:
            raise OSError("no driver")
        return KNOWN

    with pytest.raises(UnsupportedError, match="^rank 1: OSError: no driver$"):
        start_dispatcher(parts(), Requirements(), broken)


CHECKS: dict[str, Callable[[int, pytest.MonkeyPatch], None]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


def main() -> None:
    rank, store = int(sys.argv[1]), f"file://{sys.argv[2]}"
    distributed.init_process_group("gloo", store, timedelta(seconds=60), WORLD, rank)
    for name, check in CHECKS.items():
        error = ""
        try:
            with pytest.MonkeyPatch.context() as patch:
                check(rank, patch)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test shows it
            error = traceback.format_exc()
        sys.stdout.write(json.dumps({"check": name, "error": error}) + "\n")
        sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
