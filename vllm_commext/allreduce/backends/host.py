"""An all-reduce for GPUs that cannot reach each other: through host memory that all of them have
mapped; see ``csrc/cuda/host_parts.h``.

Each GPU writes its message into host memory and reads those of its peers from there, a piece as
soon as it has come. No copy engine, no host thread and no other library takes part.
"""

from typing import TYPE_CHECKING

from vllm_commext.allreduce import names
from vllm_commext.allreduce.backends.backend import TIMEOUT_SECONDS, OwnKernels
from vllm_commext.allreduce.backends.host_layout import HostLayout
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.gpu import ipc, launch
from vllm_commext.gpu.host_memory import HostMemory
from vllm_commext.gpu.launch import ELEMENT_CODES, Function, arguments_type
from vllm_commext.gpu.nvrtc import Program
from vllm_commext.gpu.peer_check import check_delivery

if TYPE_CHECKING:
    from vllm_commext.collective import Collective

MAX_MESSAGE_BYTES = 8 << 20  # of one launch
STATE_BYTES = 8
ARGUMENTS = "host_parts.h"
PLACES = ("half_packs", "first_flag", "first_message", "first_sum")  # of the layout


class HostBackend(OwnKernels):
    """A group's kernels with their memory; collective to create.

    Args:
        num_bytes: of the largest message; larger ones than `MAX_MESSAGE_BYTES` go in parts.
        collective: of the group.

    Raises:
        UnsupportedError: memory cannot be had or not be registered with a GPU, a kernel not be
            compiled, or what a GPU stores does not reach another, on any rank; all ranks raise it.
    """

    name = names.HOST

    def __init__(self, num_bytes: int, collective: "Collective") -> None:
        self._rank = collective.rank
        self._layout = HostLayout(collective.world_size, min(num_bytes, MAX_MESSAGE_BYTES))
        super().__init__(collective.world_size, self._layout.max_packs)
        self._memory: HostMemory | None = None
        self._state = 0
        collective.agree(self._load)
        try:
            self._memory = HostMemory(self._layout.num_bytes, collective, marked=self._marked)
            collective.agree(self._make_counter)
            check_delivery(self._memory.addresses, collective)
        except Exception:
            self.destroy()
            raise
        self._memory.forget_files()
        places = {name: getattr(self._layout, name) for name in PLACES}
        self._arguments = arguments_type(ARGUMENTS, WORLD_SIZE=self._world_size)(
            state=self._state, timeout_ns=int(TIMEOUT_SECONDS * 1e9), **places
        )
        self._arguments.memory[:] = self._memory.addresses

    @property
    def _marked(self) -> int:
        """Bytes that the check of delivery wants to find empty."""
        return self._world_size * PACK_BYTES

    def _load(self) -> None:
        device = launch.current_device()
        self._functions = {
            (kernel, dtype): launch.load(
                Program(kernel),
                self._layout.macros(kernel, element, self._rank),
                self._layout.threads(kernel),
                device,
                programmatic=False,
            )
            for kernel in self._layout.kernels
            for dtype, element in ELEMENT_CODES.items()
        }

    def _make_counter(self) -> None:
        self._state = ipc.allocate(STATE_BYTES)

    def _launch(self, dtype: str, num_packs: int) -> tuple[Function, int]:
        kernel = self._layout.kernel(num_packs)
        return self._functions[kernel, dtype], self._layout.num_blocks(kernel, num_packs)

    def destroy(self) -> None:
        """Give the memory back, once the GPU has done with it; a second call changes nothing."""
        import torch

        memory, self._memory = self._memory, None
        if memory is None:
            return
        torch.cuda.synchronize()
        memory.close()
        if self._state:
            ipc.free(self._state)
