"""The staging memory that our kernels push packs into, and the counter of their calls.

One for a group: any of the kernels may make the next call, as long as all ranks take the same.
"""

from typing import TYPE_CHECKING

from vllm_commext.allreduce.backends.push_layout import PushLayout
from vllm_commext.gpu.ipc import IpcBuffer, allocate, free
from vllm_commext.gpu.peer_check import EMPTY, check_delivery

if TYPE_CHECKING:
    from vllm_commext.collective import Collective

CLEANUP_SECONDS = 5.0


class PushMemory:
    """Of one rank, with that of its peers mapped; collective to create.

    It serves one stream at a time.

    Args:
        layout: its size; the kernels divide a half of it as each needs.
        collective: of the group.

    Attributes:
        half_packs: packs of 16 bytes in one of its halves.
        addresses: of each rank's memory in this process, in the order of ranks.
        state: address of the number of the last call, followed by how many blocks came since.

    Raises:
        UnsupportedError: a peer's memory cannot be mapped, or what is stored there does not arrive,
            on any rank; all ranks raise it.
    """

    def __init__(self, layout: PushLayout, collective: "Collective") -> None:
        self.half_packs = layout.half_packs
        self._buffer: IpcBuffer | None = IpcBuffer(collective, layout.num_bytes, fill=EMPTY)
        self.addresses, self.state = self._buffer.serialize(), 0
        try:
            collective.agree(self._make_counter)
            check_delivery(self.addresses, collective)
        except Exception:
            self._release(self._buffer)
            raise

    def _make_counter(self) -> None:
        self.state = allocate(8)

    def _release(self, buffer: IpcBuffer) -> None:
        buffer.cleanup(CLEANUP_SECONDS)
        if self.state:
            free(self.state)

    def destroy(self) -> None:
        """Unmap and free the memory; a second call changes nothing."""
        import torch

        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        torch.cuda.synchronize()
        self._release(buffer)
