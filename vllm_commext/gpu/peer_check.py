"""Checks that what each rank stores reaches its peers' memory; see ``csrc/cuda/peer_check.cu``."""

from collections.abc import Sequence

from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import ipc, launch
from vllm_commext.gpu.launch import arguments_type
from vllm_commext.gpu.nvrtc import Program

NAME = "peer_check"
ARGUMENTS = f"{NAME}.cu"
EMPTY = 0xFFFFFFFF  # a word that no peer has written
TIMEOUT_SECONDS = 2.0  # all ranks have met right before
ANSWER_BYTES = 4
EXCHANGED_BYTES = 8 * 16  # a pack from each of eight ranks


def silent_peers(answer: int, rank: int, world_size: int) -> list[int]:
    """Ranks from which nothing came, by the kernel's answer."""
    return [peer for peer in range(world_size) if peer != rank and not answer >> peer & 1]


def check_delivery(addresses: Sequence[int], collective: Collective) -> None:
    """Let every rank store into every peer's memory, and look whether it came; collective.

    Args:
        addresses: each rank's memory in this process, filled with `EMPTY`, which it is again
            afterwards; a pack of 16 bytes for each rank is enough.

    Raises:
        UnsupportedError: something did not come, on any rank; all ranks raise it.
    """
    rank, world_size = collective.rank, collective.world_size
    functions: list[launch.Function] = []
    macros = {"WORLD_SIZE": world_size, "RANK": rank}
    collective.agree(
        lambda: functions.append(
            launch.load(
                Program(NAME), macros, launch.WARP, launch.current_device(), programmatic=False
            )
        )
    )
    collective.agree(lambda: _look(functions[0], addresses, rank, world_size))


def _look(function: launch.Function, addresses: Sequence[int], rank: int, world_size: int) -> None:
    made = arguments_type(ARGUMENTS, WORLD_SIZE=world_size)()
    made.answer = ipc.allocate(ANSWER_BYTES)
    made.timeout_ns = int(TIMEOUT_SECONDS * 1e9)
    made.memory[:] = addresses
    try:
        function.launch(made, 1, 0)
        answer = int.from_bytes(ipc.read(made.answer, ANSWER_BYTES), "little")
    finally:
        ipc.free(made.answer)
    if silent := silent_peers(answer, rank, world_size):
        raise UnsupportedError(
            f"expected a store from each peer within {TIMEOUT_SECONDS:.0f} s, got none from ranks "
            f"{silent}: this machine maps the memory of peers and does not deliver to it"
        )
