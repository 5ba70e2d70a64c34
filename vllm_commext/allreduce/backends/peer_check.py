"""A check, before anything relies on it, that what each rank stores reaches its peers' memory; see
``csrc/cuda/peer_check.cu``."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc, launch
from vllm_commext.gpu.nvrtc import Program

if TYPE_CHECKING:
    from vllm_commext.allreduce.lockstep import Lockstep

NAME = "peer_check"
TIMEOUT_SECONDS = 2.0  # all ranks have met right before
ANSWER_BYTES = 4


def arguments_type(world_size: int) -> type[ctypes.Structure]:
    """``Args`` of the kernel, field by field."""

    class Arguments(ctypes.Structure):
        _fields_ = (
            ("answer", ctypes.c_uint64),
            ("timeout_ns", ctypes.c_uint64),
            ("memory", ctypes.c_uint64 * world_size),
        )

    return Arguments


def silent_peers(answer: int, rank: int, world_size: int) -> list[int]:
    """The ranks of which nothing came, from the kernel's answer."""
    return [peer for peer in range(world_size) if peer != rank and not answer >> peer & 1]


def check_delivery(addresses: Sequence[int], lockstep: "Lockstep") -> None:
    """Let every rank store into every peer's memory, and look whether it came; collective.

    Args:
        addresses: of each rank's memory in this process, filled with `push_layout.EMPTY`, which it
            is again afterwards.
        lockstep: of the group.

    Raises:
        UnsupportedError: something did not come, on any rank; all ranks raise it.
    """
    functions: list[launch.Function] = []
    macros = {"WORLD_SIZE": lockstep.world_size, "RANK": lockstep.rank}
    lockstep.agree(
        lambda: functions.append(
            launch.load(
                Program(NAME), macros, launch.WARP, launch.current_device(), programmatic=False
            )
        )
    )
    lockstep.agree(lambda: _look(functions[0], addresses, lockstep))


def _look(function: launch.Function, addresses: Sequence[int], lockstep: "Lockstep") -> None:
    made = arguments_type(lockstep.world_size)()
    made.answer = ipc.allocate(ANSWER_BYTES)
    made.timeout_ns = int(TIMEOUT_SECONDS * 1e9)
    made.memory[:] = addresses
    try:
        function.launch(made, 1, 0)
        answer = int.from_bytes(ipc.read(made.answer, ANSWER_BYTES), "little")
    finally:
        ipc.free(made.answer)
    if silent := silent_peers(answer, lockstep.rank, lockstep.world_size):
        raise UnsupportedError(
            f"expected a store from each peer within {TIMEOUT_SECONDS:.0f} s, got none from ranks "
            f"{silent}: this machine maps the memory of peers and does not deliver to it"
        )
