"""The staging memory that our kernels push packs into, and the counter of their calls.

One for a group: any of the kernels may make the next call, as long as all ranks take the same.
"""

from typing import TYPE_CHECKING

from vllm_commext.allreduce.backends.push_layout import PushLayout
from vllm_commext.gpu.ipc import IpcBuffer, allocate, free
from vllm_commext.gpu.peer_check import EMPTY, check_delivery

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from vllm_commext.allreduce.lockstep import Lockstep

CLEANUP_SECONDS = 5.0


class PushMemory:
    """Of one rank, with that of its peers mapped; collective to create.

    It serves one stream at a time.

    Args:
        group: sends objects without a GPU.
        layout: its size; the kernels divide a half of it as each needs.
        lockstep: of the group.

    Attributes:
        half_packs: packs of 16 bytes in one of its halves.
        addresses: of each rank's memory in this process, in the order of ranks.
        state: address of the number of the last call, followed by how many blocks came since.

    Raises:
        UnsupportedError: a peer's memory cannot be mapped, or what is stored there does not arrive,
            on any rank; all ranks raise it.
    """

    def __init__(self, group: "ProcessGroup", layout: PushLayout, lockstep: "Lockstep") -> None:
        self.half_packs = layout.half_packs
        self._buffer: IpcBuffer | None = IpcBuffer(
            lockstep.rank, lockstep.world_size, layout.num_bytes, group, fill=EMPTY
        )
        self.addresses, self.state = self._buffer.serialize(), 0
        try:
            lockstep.agree(self._make_counter)
            check_delivery(self.addresses, lockstep.rank, lockstep.world_size, lockstep.agree)
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
