"""The connector's scheduler side: decides what is loaded and what is kept, and serves the side
channel."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.fence import FenceSlots
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from vllm_commext.nixl.params import is_for_decode, is_for_prefill, read_params, write_params
from vllm_commext.nixl.plan import missing_block_range, num_blocks_for
from vllm_commext.nixl.quarantine import Quarantine
from vllm_commext.nixl.requests import Hold, Load, RemoteRequest
from vllm_commext.nixl.side_channel import SideChannelServer

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

_FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """One engine's requests, as the connector sees them.

    Args:
        engine_id: this engine's id.
        config: the connector's settings.
        block_size: tokens a block.
        tp_size: tensor-parallel ranks of this engine.
        port: this engine's side-channel port.
        produces: the role lets this engine prefill for others.
        consumes: the role lets this engine decode for others.
    """

    def __init__(
        self,
        engine_id: str,
        config: ConnectorConfig,
        *,
        block_size: int,
        tp_size: int,
        port: int,
        produces: bool,
        consumes: bool,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self._config = config
        self._block_size = block_size
        self._tp_size = tp_size
        self._port = port
        self._produces = produces
        self._consumes = consumes
        self._pending = StepMetadata()
        self._quarantine = Quarantine(tp_size)
        self._fences = FenceSlots()
        self._server: SideChannelServer | None = None
        self._log = RateLimitedLog()

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """Learn of the pool, so that blocks of late loads can be kept out of use."""
        self._quarantine.bind(block_pool)

    def serve(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Serve the workers' descriptions; ``metadata`` is keyed by (pipeline rank, tensor rank).

        Raises:
            ConfigError: the side channel's address cannot be bound.
        """
        descriptions = {
            tp_rank: worker.description
            for (_, tp_rank), worker in metadata.items()
            if isinstance(worker, HandshakeMetadata)
        }
        if not self._produces or self._server is not None:
            return
        self._server = SideChannelServer(
            self.engine_id,
            self.incarnation,
            self._config.side_channel_host,
            self._port,
            descriptions,
        )
        logger.info(
            "prefill engine %s serves its side channel on %s:%d",
            self.engine_id,
            self._config.side_channel_host,
            self._port,
        )

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def note_arrival(self, request: Request) -> None:
        """A request came in: say so where it asks for what this engine's role does not do."""
        params = request.kv_transfer_params
        if is_for_decode(params) and not self._consumes:
            self._refuse_role(request, "do_remote_prefill", "kv_producer")
        elif is_for_prefill(params) and not self._produces:
            self._refuse_role(request, "do_remote_decode", "kv_consumer")

    def num_tokens_to_load(self, request: Request, num_computed_tokens: int) -> int:
        """Prompt tokens beyond ``num_computed_tokens`` that the prefill engine offers."""
        if not self._is_to_load(request):
            return 0
        try:
            num_tokens = self._remote(request).num_tokens
        except ProtocolError:
            # The load fails with the reason, so that vLLM's policy decides between error and
            # recomputation.
            num_tokens = request.num_prompt_tokens
        return max(0, num_tokens - num_computed_tokens)

    def plan_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are allocated: queue the load, or only the release where nothing is missing."""
        if not self._is_to_load(request):
            return
        self._take_load(request)
        load = Load(request.request_id, None, awaited=num_external_tokens > 0)
        try:
            remote = load.remote = self._remote(request)
            num_tokens = remote.num_tokens
        except ProtocolError as error:
            load.refusal = str(error)
            num_tokens = request.num_prompt_tokens
        if load.awaited:
            # A refused load has its blocks too: vLLM before 0.30 is told of a failure by them.
            self._choose_blocks(load, num_tokens, blocks, num_external_tokens)
            self._quarantine.note_load(request.request_id, blocks.blocks[0])
        self._pending.loads.append(load)

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks must be kept, and what the decode engine must
        know."""
        if self._is_to_load(request):
            self._release_unread(request)
            return False, None
        if not (is_for_prefill(request.kv_transfer_params) and self._produces):
            return False, None
        if request.status not in _FINISHED or not block_ids[0]:
            return False, None
        fence = self._fences.take(request.request_id)
        if fence is None:
            self._log.warning(
                "fences",
                f"request {request.request_id}: its blocks are not kept, as many prefills as this "
                "engine can keep wait for their readers; the decode engine computes it itself",
            )
            return False, None
        lease = self._config.kv_lease_duration
        self._pending.holds.append(Hold(request.request_id, lease, *fence))
        num_blocks = num_blocks_for(request.num_computed_tokens, self._block_size)
        remote = RemoteRequest(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            host=self._config.side_channel_host,
            port=self._port,
            tp_size=self._tp_size,
            request_id=request.request_id,
            block_ids=tuple(block_ids[0][:num_blocks]),
            num_tokens=request.num_computed_tokens,
            fence_slot=fence[0],
            fence_ticket=fence[1],
        )
        return True, write_params(remote)

    def take_step(self) -> StepMetadata:
        """What the workers must know of this step."""
        taken, self._pending = self._pending, StepMetadata()
        taken.given_up = self._quarantine.take_given_up()
        return taken

    def note_outcomes(self, received: set[str], sent: set[str], worker: Any) -> None:
        """Loads ended or are late on the workers, and prefills are no longer kept."""
        for request_id in received:
            self._quarantine.note_end(request_id)
        for request_id in sent:
            self._fences.give_back(request_id)
        if isinstance(worker, WorkerMetadata):
            self._quarantine.note_late(worker.late)
            self._quarantine.note_settled(worker.settled)

    def _is_to_load(self, request: Request) -> bool:
        return self._consumes and is_for_decode(request.kv_transfer_params)

    def _remote(self, request: Request) -> RemoteRequest:
        params = request.kv_transfer_params
        assert params is not None  # only called where the parameters ask for a remote prefill
        return read_params(params, request.num_prompt_tokens)

    def _take_load(self, request: Request) -> None:
        """Each request is loaded once: mark it."""
        params = request.kv_transfer_params
        assert params is not None  # only called where the parameters ask for a remote prefill
        params["do_remote_prefill"] = False

    def _choose_blocks(
        self, load: Load, num_tokens: int, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        first, end = missing_block_range(
            num_prompt_tokens=num_tokens,
            num_external_tokens=num_external_tokens,
            block_size=self._block_size,
        )
        load.first = first
        load.local_block_ids = [block.block_id for block in blocks.blocks[0][first:end]]

    def _release_unread(self, request: Request) -> None:
        """The request ended before its load was planned: let the prefill engine free its blocks."""
        self._take_load(request)
        try:
            remote = self._remote(request)
        except ProtocolError:
            return
        self._pending.loads.append(Load(request.request_id, remote, awaited=False))

    def _refuse_role(self, request: Request, asked: str, role: str) -> None:
        self._log.warning(
            asked,
            f"request {request.request_id} asks for {asked}, which kv_role {role!r} does not do; "
            "it is served as an ordinary request. Check which engine the router sends it to",
        )
