"""The connector's scheduler side: decides what is loaded and kept, and serves the side channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_commext.drain import drain_file
from vllm_commext.errors import ConfigError
from vllm_commext.nixl.decode.remote_prompts import RemotePrompts
from vllm_commext.nixl.engine_context import EngineContext
from vllm_commext.nixl.geometry.topology import Rank, worker_number
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from vllm_commext.nixl.prefill.prefill_state import releases_of
from vllm_commext.nixl.prefill.prefills import Prefills
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.recorder import GAUGES, HANDOVERS, STREAMS, empty_data
from vllm_commext.nixl.reuse import ReuseSide
from vllm_commext.nixl.wire.params import is_for_decode, is_for_prefill, params_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


_OPEN = (
    ", without a secret: whoever reaches it can read and write the KV cache; set "
    "side_channel_secret_file"
)


class SchedulerSide:
    """One engine's requests, as the connector sees them.

    Raises:
        ConfigError: the side channel's secret cannot be read.
    """

    def __init__(self, engine: EngineContext) -> None:
        self.engine = engine
        self._prefills = Prefills(engine)
        self._reuse = ReuseSide(engine)
        self.prompts = RemotePrompts(engine, self._reuse)
        wakeup = engine.wakeup.address
        engine.step = StepMetadata(fence_key=engine.fence_key, wakeup=wakeup)
        self._server: SideChannelServer | None = None
        self._log = RateLimitedLog()

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        self.prompts.quarantine.bind(block_pool)
        self._reuse.bind(block_pool)

    def serve(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Serve the workers' descriptions; ``metadata`` is keyed by (pipeline rank, tensor rank);
        raises ConfigError."""
        engine = self.engine
        workers = {
            worker_number(stage, Rank(engine.tp_size, rank)): worker
            for (stage, rank), worker in metadata.items()
            if isinstance(worker, HandshakeMetadata)
        }
        descriptions = {number: worker.description for number, worker in workers.items()}
        if not (engine.produces or self._reuse.is_on) or self._server is not None:
            return
        if len(descriptions) < len(metadata):
            kinds = sorted({type(worker).__name__ for worker in metadata.values()})
            raise ConfigError(
                f"expected CommextNixlConnector's description of each worker, got {kinds}: "
                "MultiConnector passes on those of its first connector that has any, so name "
                "CommextNixlConnector before it"
            )
        file = drain_file()
        self._server = SideChannelServer(
            *(engine.engine_id, engine.incarnation, engine.config.side_channel_host, engine.port),
            *(descriptions, engine.secret),
            None if file is None else file.is_there,
            None if engine.streaming.refusal else self._prefills.directory,
            self._reuse.open([worker.generations for worker in workers.values()]),
        )
        logger.info(
            "engine %s serves its side channel on %s:%d%s",
            *(engine.engine_id, engine.config.side_channel_host, engine.port),
            "" if engine.secret else _OPEN,
        )

    def close(self) -> None:
        self.engine.client.close()
        self.engine.wakeup.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def note_arrival(self, request: Request) -> None:
        """A request came in: its prompt is computed for another engine, read from one, or neither;
        say so where it asks for what this engine's role does not do."""
        # vLLM looks into them after this.
        request.kv_transfer_params = params = params_of(request)
        if is_for_prefill(params) and self.engine.produces:
            self.engine.recorder.count_reason(HANDOVERS, self._prefills.add(request))
        if keys := releases_of(params):
            known = self._prefills.release(keys)
            self.engine.recorder.count(released_requests=known, unknown_releases=len(keys) - known)
        if is_for_decode(params) and self.engine.consumes:
            self.prompts.add(request)
        else:
            self.prompts.search(request)
        if is_for_decode(params) and not self.engine.consumes:
            self._refuse_role(request, "do_remote_prefill", "kv_producer")
        elif is_for_prefill(params) and not self.engine.produces:
            self._refuse_role(request, "do_remote_decode", "kv_consumer")

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_unread = self.prompts.finish(request)
        self._reuse.end(request.request_id)
        return self._prefills.finish(request, block_ids, is_computed=not is_unread)

    def forget_computed(self) -> None:
        self.prompts.forget_computed()
        self._prefills.release_all()
        self._prefills.forget_computed(lambda _: True)
        self._reuse.clear()

    def begin_new_weights(
        self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], None]:
        self.forget_computed()
        return self.engine.identity.begin_new_weights(method, args, kwargs)

    def begin_adapter(self, lora: LoRARequest) -> Callable[[], None]:
        """The workers are about to load an adapter, perhaps in another one's place; returns what to
        call when they have."""

        def is_concerned(request: Request) -> bool:
            known = request.lora_request
            return known is not None and known.lora_int_id == lora.lora_int_id

        settle = self.engine.identity.adapters.begin_load(lora)
        if settle is None:
            return lambda: None
        self.prompts.forget_adapter(is_concerned)
        self._prefills.forget_computed(is_concerned)
        self._reuse.forget_running(is_concerned)
        return settle

    def note_pause(self, *, is_paused: bool) -> None:
        if is_paused:
            self._prefills.release_all()
        self.prompts.note_pause(is_paused=is_paused)

    def is_at_rest(self) -> bool:
        return self.prompts.is_at_rest and not (self.has_news() or self._prefills.num_held > 0)

    def take_stats(self) -> dict[str, Any] | None:
        recorder = self.engine.recorder
        if self._server is not None:
            recorder.count(side_channel_rejects=self._server.take_refused())
        own: dict[str, float] = {
            "quarantined_blocks": len(self.prompts.quarantine),
            "held_requests": self._prefills.num_held,
            STREAMS: float(self.engine.streaming.refusal is None),
        }
        recorder.gauges("scheduler", own)
        data, gauges = recorder.take(), recorder.take_gauges()
        return {**(data or empty_data()), GAUGES: gauges} if data or gauges else None

    def take_step(self, scheduled: SchedulerOutput) -> StepMetadata:
        taken, self.engine.step = self.engine.step, StepMetadata()
        loaded = {load.request_id for load in taken.loads}
        taken.waits = [wait for wait in taken.waits if wait.request_id not in loaded]
        self._prefills.fill_step(taken, scheduled)
        return taken

    def has_news(self) -> bool:
        return self.engine.step != StepMetadata()

    def is_loading(self, request_id: str) -> bool:
        return self.prompts.is_loading(request_id)

    def note_outcomes(self, received: set[str], sent: set[str], worker: Any) -> None:
        """Loads ended or are late on the workers, and prefills are no longer kept.

        ``received`` and ``sent`` hold what has ended on all workers: each request is counted once.
        """
        told = worker if isinstance(worker, WorkerMetadata) else WorkerMetadata()
        for source, values in told.gauges.items():
            self.engine.recorder.gauges(source, values)
        self.prompts.note_outcomes(received, told)
        self._prefills.note_outcomes(sent, told.expired)

    def _refuse_role(self, request: Request, asked: str, role: str) -> None:
        self._log.warning(
            asked,
            f"request {request.request_id} asks for {asked}, which kv_role {role!r} does not do; "
            "it is served as an ordinary request. Check which engine the router sends it to",
        )
