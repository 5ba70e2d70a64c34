"""What a worker has for reads through mappings: an offer to others, and what opens theirs."""

import os
from collections.abc import Sequence

from vllm_commext.gpu import ipc
from vllm_commext.gpu.ipc import allocation_of
from vllm_commext.nixl.config import AUTO, ConnectorConfig
from vllm_commext.nixl.log import logger
from vllm_commext.nixl.mapped.gather import CudaDevice
from vllm_commext.nixl.mapped.reader import Mapper, place_of_process
from vllm_commext.nixl.wire import messages as wire

TOKEN_BYTES = 256
OTHERWISE = "reads go through NIXL"


class Mapped:
    """One worker's side of it; without any where the configuration or the machine has none.

    Attributes: ``mapper``: opens other workers' memory.  ``offer``: what others open.

    Args:
        config: the connector's settings.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        self._is_wanted = config.mapped_reads == AUTO
        self._token_address = 0
        self.mapper: Mapper | None = None
        self.offer: wire.MappedOffer | None = None

    def prepare(self, ranges: Sequence[tuple[int, int]], *, is_on_gpu: bool) -> None:
        """Make what is wanted, or say in one line why there is none.

        Args:
            ranges: ``(address, num_bytes)`` of each allocation with parts of the cache.
            is_on_gpu: it is memory of a GPU of NVIDIA's.
        """
        if not self._is_wanted:
            return
        if not is_on_gpu:
            logger.debug("mapped_reads: the KV cache is in host memory; %s", OTHERWISE)
            return
        try:
            self.mapper = Mapper(CudaDevice(), place_of_process())
        except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
            logger.warning("mapped_reads: this worker cannot read so: %s; %s", error, OTHERWISE)
        try:
            self.offer = self._make_offer(ranges)
        except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
            self.close()
            ipc.forget_error()
            logger.warning("mapped_reads: others cannot map this worker's cache: %s", error)

    def close(self) -> None:
        """Offer nothing any more; safe to repeat."""
        address, self._token_address = self._token_address, 0
        self.offer = None
        if address:
            ipc.free(address)

    def _make_offer(self, ranges: Sequence[tuple[int, int]]) -> wire.MappedOffer:
        token = os.urandom(TOKEN_BYTES)
        # Whole pieces of memory: smaller ones are shared together with their neighbours.
        self._token_address = ipc.allocate(ipc.round_up(TOKEN_BYTES))
        ipc.write(self._token_address, token)
        addresses = [self._token_address, *(address for address, _ in ranges)]
        found = dict(map(allocation_of, addresses))
        return wire.MappedOffer(
            place=place_of_process(),
            regions=[
                wire.MappedRegion(address=base, num_bytes=size, handle=ipc.export_handle(base))
                for base, size in found.items()
            ],
            token_address=self._token_address,
            token=token,
        )
