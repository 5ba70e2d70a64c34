"""The check of peer memory: its kernel on a CPU, and what it says where stores are lost."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kit.host_kernels import COMPILER, compile_kernel, run_calls
from tests.kit.threads import together
from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc
from vllm_commext.gpu.ipc import EMPTY, PEER_CHECK, PEER_CHECK_ARGUMENTS, silent_peers
from vllm_commext.gpu.launch import Device, Program, arguments_type

WORDS = 8 * 4  # of each memory: a pack from each rank
PATIENT_NS = 60_000_000_000
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ on this machine")


class Machine:
    def __init__(self, world_size: int, lost: set[tuple[int, int]]) -> None:
        self.world_size, self.lost = world_size, lost
        self.memories = [np.full(WORDS, EMPTY, np.uint32) for _ in range(world_size)]
        self.nowhere = np.full(WORDS, EMPTY, np.uint32)
        self.answers = [np.zeros(1, np.uint32) for _ in range(world_size)]
        self.kernel = compile_kernel(Program(PEER_CHECK), {"WORLD_SIZE": world_size})
        assert self.kernel.args_bytes() == ctypes.sizeof(
            arguments_type(PEER_CHECK_ARGUMENTS, WORLD_SIZE=world_size)
        )

    def addresses(self, rank: int) -> list[int]:
        return [
            (self.nowhere if (rank, peer) in self.lost else memory).ctypes.data
            for peer, memory in enumerate(self.memories)
        ]

    def launch(self, arguments: ctypes.Structure, rank: int) -> None:
        run_calls(self.kernel, ctypes.byref(arguments), [1], 1, rank, rank)

    def run(self, timeout_ns: int) -> list[int]:
        def body(rank: int) -> None:
            made = arguments_type(PEER_CHECK_ARGUMENTS, WORLD_SIZE=self.world_size)()
            made.answer, made.timeout_ns = self.answers[rank].ctypes.data, timeout_ns
            made.memory[:] = self.addresses(rank)
            self.launch(made, rank)

        together(body, self.world_size)
        return [int(answer[0]) for answer in self.answers]


@needs_compiler
@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_where_every_store_arrives_nobody_is_missed(world_size: int) -> None:
    machine = Machine(world_size, set())
    for rank, answer in enumerate(machine.run(PATIENT_NS)):
        assert silent_peers(answer, rank, world_size) == []
        assert answer == (1 << world_size) - 1 - (1 << rank)
    assert all((memory == EMPTY).all() for memory in machine.memories)


@needs_compiler
def test_another_ranks_store_in_its_place_is_none() -> None:
    """A machine that delivers to the wrong address: the pack comes, and is not the one."""
    machine = Machine(2, {(0, 1)})
    wrong = np.arange(4, dtype=np.uint32)
    machine.memories[1][:4] = wrong
    assert silent_peers(machine.run(PATIENT_NS)[1], 1, 2) == [0]


@needs_compiler
@pytest.mark.parametrize("lost", [set[tuple[int, int]](), {(0, 1)}], ids=["all", "lost"])
def test_the_check_from_end_to_end(
    lost: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments that a real launch gets, and the sentence of a rank that something missed."""
    machine = Machine(2, lost)
    answers: dict[int, Any] = {}

    def allocate(num_bytes: int) -> int:
        made = np.zeros(num_bytes // 4, np.uint32)
        answers[made.ctypes.data] = made
        return made.ctypes.data

    monkeypatch.setattr(ipc, "allocate", allocate)
    monkeypatch.setattr(ipc, "free", answers.pop)
    monkeypatch.setattr(ipc, "read", lambda address, _: answers[address].tobytes())
    monkeypatch.setattr(ipc.launch, "current_device", lambda: Device(0, 90, 2))
    monkeypatch.setattr(ipc, "TIMEOUT_SECONDS", 60.0 if not lost else 0.2)

    def load(program: Program, macros: dict[str, int], *_: Any, **__: Any) -> Any:
        assert program.name == PEER_CHECK
        rank = macros["RANK"]
        return SimpleNamespace(launch=lambda made, blocks, _: machine.launch(made, rank))

    monkeypatch.setattr(ipc.launch, "load", load)
    said: dict[int, str] = {}

    def body(rank: int) -> None:
        try:
            alone = Collective(rank, 2, lambda mine: [mine])
            ipc.check_delivery(machine.addresses(rank), alone)
        except UnsupportedError as error:
            said[rank] = str(error)

    together(body, 2)
    assert answers == {}
    if lost:
        assert "got none from ranks [0]" in said[1]
    else:
        assert said == {}
