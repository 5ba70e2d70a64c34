"""All-reduce kernels of our own for large messages; see ``csrc/cuda/push_all_reduce.cu`` for two
ranks and ``csrc/cuda/push_two_shot.cu`` for more.

They push the message over the links and add what arrives at the same time, so that they need no
copy into memory that peers can read, which all other kernels that take a plain tensor make first.
"""

from typing import TYPE_CHECKING

from vllm_commext.allreduce import names
from vllm_commext.allreduce.backends.backend import TIMEOUT_SECONDS, OwnKernels
from vllm_commext.allreduce.backends.push_layout import PushLayout
from vllm_commext.allreduce.backends.push_memory import PushMemory
from vllm_commext.gpu import launch
from vllm_commext.gpu.launch import ELEMENT_CODES, Function, arguments_type
from vllm_commext.gpu.nvrtc import Program

if TYPE_CHECKING:
    from vllm_commext.collective import Collective

BLOCKS_PER_MULTIPROCESSOR = 2
MAX_MESSAGE_BYTES = 64 << 20
ARGUMENTS = "push_args.h"


def program(layout: PushLayout) -> Program:
    """The kernel's source."""
    return Program(layout.kernel)


class PushBackend(OwnKernels):
    """A group's kernel with its memory; collective to create.

    Args:
        num_bytes: of the largest message that one launch takes.
        collective: of the group.

    Attributes:
        memory: which other kernels of ours may use too.

    Raises:
        UnsupportedError: a peer's memory cannot be mapped or the kernel not be compiled, on any
            rank; all ranks raise it.
    """

    name = names.PUSH

    def __init__(self, num_bytes: int, collective: "Collective") -> None:
        self._rank = collective.rank
        self._layout = PushLayout(collective.world_size, num_bytes)
        super().__init__(collective.world_size, self._layout.max_packs)
        collective.agree(self._load)
        self.memory = PushMemory(self._layout, collective)
        self._arguments = arguments_type(ARGUMENTS, WORLD_SIZE=self._world_size)(
            state=self.memory.state,
            max_packs=self._max_packs,
            timeout_ns=int(TIMEOUT_SECONDS * 1e9),
        )
        self._arguments.memory[:] = self.memory.addresses

    def _load(self) -> None:
        device = launch.current_device()
        self._most_blocks = BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors
        source = program(self._layout)
        self._functions = {
            dtype: launch.load(
                *(source, self._layout.macros(element, self._rank), self._layout.threads, device),
                programmatic=False,
            )
            for dtype, element in ELEMENT_CODES.items()
        }

    def _launch(self, dtype: str, num_packs: int) -> tuple[Function, int]:
        return self._functions[dtype], self._layout.num_blocks(num_packs, self._most_blocks)

    def destroy(self) -> None:
        """Unmap and free the memory; a second call changes nothing."""
        self.memory.destroy()
