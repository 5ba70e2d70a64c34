"""The connector's scheduler side: decides what is loaded and what is kept, and serves the side
channel."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_commext.drain import drain_file
from vllm_commext.errors import ConfigError, ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.params_cache import ParamsCache
from vllm_commext.nixl.decode.quarantine import Quarantine
from vllm_commext.nixl.decode.trust import Trust
from vllm_commext.nixl.first_token import Sampler, refusal_of, source_of
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.request_blocks import blocks_to_fill, is_at_block_boundary
from vllm_commext.nixl.geometry.topology import Rank, worker_number
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.metadata import HandshakeMetadata, StepMetadata, WorkerMetadata
from vllm_commext.nixl.metrics.recorder import (
    FAILURES,
    FIRST_TOKENS,
    GAUGES,
    HANDOVERS,
    Ends,
    TransferRecorder,
    empty_data,
)
from vllm_commext.nixl.prefill.fence import new_key
from vllm_commext.nixl.prefill.keys import releases_of
from vllm_commext.nixl.prefill.prefills import FINISHED, EngineAddress, Prefills
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.reasons import FirstToken, Handover
from vllm_commext.nixl.requests import Load, Wait
from vllm_commext.nixl.reuse.reusing import Reusing
from vllm_commext.nixl.reuse.side import ReuseSide
from vllm_commext.nixl.stream.consumer import consumer_of
from vllm_commext.nixl.stream.streaming import Streaming
from vllm_commext.nixl.wakeup_socket import WakeupSocket
from vllm_commext.nixl.wire.client import ClientThread
from vllm_commext.nixl.wire.params import (
    OtherProtocolError,
    TransferParams,
    asks_for_stream,
    is_for_decode,
    is_for_prefill,
    params_of,
)
from vllm_commext.nixl.wire.prompt import OtherPromptError
from vllm_commext.nixl.wire.seal import read_secret

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_commext.nixl.geometry.layout import Group

TOKEN_SECONDS = 0.005
"""That an engine with nothing to compute waits for the first token after a prompt that is here: a
prefill engine knows it a few milliseconds after the last chunk's end, and computing it would take a
step."""
_NO_FIRST_TOKENS = Sampler()
_NO_STREAMS = Streaming()
_NO_REUSE = Reusing()


class SchedulerSide:
    """One engine's requests, as the connector sees them.

    Args:
        engine_id: this engine's id.
        config: the connector's settings.
        groups: the cache's groups, in the order of a request's lists of blocks.
        tp_size: tensor-parallel ranks of this engine.
        pp_size: its pipeline stages.
        port: this engine's side-channel port.
        produces: the role lets this engine prefill for others.
        consumes: the role lets this engine decode for others.
        saves: peers read from a copy of the cache on the host, which must be kept up to date.
        sampler: what first tokens follow from beside requests; by default, none is handed over.
        streaming: what this engine does of chunk streaming; by default, nothing.
        reusing: what it does of reuse across engines; by default, nothing.

    Raises:
        ConfigError: the side channel's secret cannot be read.
    """

    def __init__(
        self,
        engine_id: str,
        config: ConnectorConfig,
        *,
        groups: Sequence[Group],
        tp_size: int,
        port: int,
        produces: bool,
        consumes: bool,
        pp_size: int = 1,
        saves: bool = False,
        sampler: Sampler = _NO_FIRST_TOKENS,
        streaming: Streaming = _NO_STREAMS,
        reusing: Reusing = _NO_REUSE,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self._config = config
        self._secret = read_secret(config.side_channel_secret_file)
        self._sampler = sampler
        # First tokens that can be sent; requests that are computed here if their loads fail, as
        # their clients have their first tokens or nobody else has their blocks; failed loads that
        # vLLM is not told of.
        self._first_tokens: dict[str, tuple[Request, int]] = {}
        self._recomputed: set[str] = set()
        self._failed_unread: set[str] = set()
        self._unread: list[tuple[str, bool]] = []
        # Requests that are read while they are computed and whose first tokens are awaited, each
        # with where it is read once that is known, and those of them whose prompts are here.
        self._awaited: dict[str, tuple[Request, TransferParams | None]] = {}
        self._loaded: list[str] = []
        self._has_steps = False
        self._trust = Trust(config.kv_lease_duration)
        self._groups = groups
        self._tp_size = tp_size
        self._port = port
        self._produces = produces
        self._consumes = consumes
        fence_key = new_key()
        self.wakeup = WakeupSocket(tp_size * pp_size)
        self._pending = StepMetadata(fence_key=fence_key, wakeup=self.wakeup.address)
        self._quarantine = Quarantine(tp_size * pp_size)
        self._streaming = streaming
        host = config.side_channel_host
        self._prefills = Prefills(
            EngineAddress(engine_id, self.incarnation, host, port, tp_size, pp_size),
            groups,
            lease_seconds=config.kv_lease_duration,
            secret=self._secret,
            fence_key=fence_key,
            saves=saves,
            sampler=sampler,
            streaming=streaming,
        )
        self._client = ClientThread(self._secret)
        self._consumer = consumer_of(streaming, engine_id, self._client, config, self.wakeup.notify)
        self._params_cache = ParamsCache(groups, self._secret, sampler, self._consumer)
        self._server: SideChannelServer | None = None
        self._recorder = TransferRecorder()
        self._reuse = ReuseSide(
            reusing,
            engine_id,
            self._secret,
            self._client,
            config.reuse_lookup_timeout,
            self._recorder,
            self.wakeup.notify,
        )
        # Blocks of the loads under way; when requests came in that are read whole, in monotonic
        # seconds; what of loads and of held requests has gone wrong on the
        # ranks that are done.
        self._loading: dict[str, int] = {}
        self._arrived: dict[str, float] = {}
        self._ends = Ends()
        self._log = RateLimitedLog()

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """Learn of the pool, so that blocks of late loads can be kept out of use, and blocks of
        finished requests offered until they are used again."""
        self._quarantine.bind(block_pool)
        self._reuse.bind(block_pool)

    def serve(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Serve the workers' descriptions; ``metadata`` is keyed by (pipeline rank, tensor rank).

        Raises:
            ConfigError: the side channel's address cannot be bound, or the descriptions are those
                of another connector.
        """
        workers = {
            worker_number(stage, Rank(self._tp_size, rank)): worker
            for (stage, rank), worker in metadata.items()
            if isinstance(worker, HandshakeMetadata)
        }
        descriptions = {number: worker.description for number, worker in workers.items()}
        if not (self._produces or self._reuse.is_on) or self._server is not None:
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
            self.engine_id,
            self.incarnation,
            self._config.side_channel_host,
            self._port,
            descriptions,
            self._secret,
            None if file is None else file.is_there,
            None if self._streaming.refusal else self._prefills.directory,
            self._reuse.open([worker.generations for worker in workers.values()]),
        )
        logger.info(
            "engine %s serves its side channel on %s:%d",
            self.engine_id,
            self._config.side_channel_host,
            self._port,
        )

    def close(self) -> None:
        """Stop serving."""
        self._client.close()
        self.wakeup.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def note_arrival(self, request: Request) -> None:
        """A request came in: its prompt is computed for another engine, read from one, or neither;
        say so where it asks for what this engine's role does not do."""
        # vLLM looks into them after this.
        request.kv_transfer_params = params = params_of(request)
        if is_for_prefill(params) and self._produces:
            self._recorder.count_reason(HANDOVERS, self._prefills.add(request))
        if keys := releases_of(params):
            known = self._prefills.release(keys)
            self._recorder.count(released_requests=known, unknown_releases=len(keys) - known)
        if self._is_to_load(request):
            self._welcome(request)
        else:
            self._reuse.search(request)
        if is_for_decode(params) and not self._consumes:
            self._refuse_role(request, "do_remote_prefill", "kv_producer")
        elif is_for_prefill(params) and not self._produces:
            self._refuse_role(request, "do_remote_decode", "kv_consumer")

    def _welcome(self, request: Request) -> None:
        """Have the blocks kept where they are until there is room for them here, and look whether
        the first token is there."""
        if asks_for_stream(params_of(request)):
            refusal = refusal_of(self._sampler, request)
            self._consumer.watch(request, awaits_token=not refusal)
            if refusal:
                self._recorder.count_reason(FIRST_TOKENS, refusal)
            else:
                self._awaited[request.request_id] = request, None
            return
        self._recorder.count_reason(HANDOVERS, Handover.NO_KEY)
        try:
            transfer_params = self._params_cache.of(request)
        except OtherPromptError:
            self._recorder.count_reason(FIRST_TOKENS, FirstToken.DIFFERS)
            return
        except ProtocolError:
            return  # the load will fail with the reason
        self._arrived[request.request_id] = time.monotonic()
        if not self._trust.admit(request.request_id, transfer_params.computed_at):
            self._recorder.count_reason(FIRST_TOKENS, FirstToken.DIFFERS)
            return
        self._pending.waits.append(Wait(request.request_id, transfer_params.remote))
        way = source_of(self._sampler, transfer_params, request)
        if way == FirstToken.PREFILL:
            self._first_tokens[request.request_id] = request, transfer_params.first_token
        else:
            self._recorder.count_reason(FIRST_TOKENS, way)

    def take_first_tokens(self, *, is_idle: bool = False) -> list[tuple[Request, int]]:
        """Requests that have come in since the last call, or that are read while they are computed
        and whose first tokens have come since then, and the first token of each that is there;
        ``note_first_token`` says what has become of it. An engine that *is idle* waits for those
        that are about to come."""
        loaded, self._loaded = self._loaded, []
        for request_id in loaded:
            if request_id in self._awaited:
                self._consumer.wait_for_token(request_id, TOKEN_SECONDS if is_idle else 0.0)
        for request_id, told in self._consumer.take_tokens().items():
            self._take_token(request_id, *told)
        for request_id in loaded:
            self._await_no_token(request_id, FirstToken.NOT_OFFERED)
        taken, self._first_tokens = list(self._first_tokens.values()), {}
        return taken

    def _take_token(self, request_id: str, token: int, sampling: str) -> None:
        """The prefill engine tells the token after a prompt: the answer begins with it if it is
        drawn as this engine would draw it, after the prompt that the request has here."""
        request, transfer_params = self._awaited.get(request_id, (None, None))
        if request is not None and transfer_params is None:
            self._waits_for_stream(request)  # takes the answer, which is there before the token
            _, transfer_params = self._awaited.get(request_id, (None, None))
        if request is None or transfer_params is None:
            return
        way = source_of(
            self._sampler, replace(transfer_params, first_token=token, sampling=sampling), request
        )
        if way == FirstToken.PREFILL and token < self._sampler.num_tokens:
            del self._awaited[request_id]
            self._consumer.forget(request_id)
            self._first_tokens[request_id] = request, token
        else:
            self._await_no_token(
                request_id, FirstToken.DIFFERS if way == FirstToken.PREFILL else way
            )

    def _await_no_token(self, request_id: str, way: FirstToken) -> None:
        """A request's first token is computed here, if it has none yet."""
        if self._awaited.pop(request_id, None) is not None:
            self._consumer.forget(request_id)
            self._recorder.count_reason(FIRST_TOKENS, way)

    def note_first_token(self, request: Request, way: FirstToken) -> None:
        """Count where a request's first token comes from."""
        self._recorder.count_reason(FIRST_TOKENS, way)
        if way == FirstToken.PREFILL:
            self._recomputed.add(request.request_id)

    def note_step(self, defer_frees: Callable[[], bool]) -> None:
        """The engine is going to take a step; see ``ReuseSide.note_step``."""
        self._has_steps = True
        self._reuse.note_step(defer_frees)

    def take_unread(self) -> list[tuple[str, bool]]:
        """Requests whose loads have failed, and that vLLM has not been told of, and whether they
        must be computed here, whatever its policy; asked before each step."""
        taken, self._unread = self._unread, []
        return taken

    def num_tokens_to_load(self, request: Request, num_computed_tokens: int) -> int | None:
        """Prompt tokens beyond ``num_computed_tokens`` that the prefill engine offers; None while
        it has not begun with them."""
        if not self._is_to_load(request):
            most = request.num_prompt_tokens - 1
            return self._reuse.num_tokens(request.request_id, num_computed_tokens, most)
        if self._waits_for_stream(request):
            return None
        if request.request_id not in self._trust:
            return 0
        if request.skip_reading_prefix_cache:
            return 0  # the logprobs of the prompt's tokens come of computing them
        if not is_at_block_boundary(self._groups, num_computed_tokens):
            return 0  # a shared block is being copied for this request: compute the rest here
        try:
            num_tokens = self._params_cache.num_tokens(request)
        except OtherPromptError:
            return 0  # as routers do with the second of a request's prompts: compute it here
        except ProtocolError:
            # The load fails with the reason, so that vLLM's policy decides between error and
            # recomputation.
            num_tokens = self._params_cache.most_tokens(request)
        return max(0, num_tokens - num_computed_tokens)

    def _waits_for_stream(self, request: Request) -> bool:
        """Whether a request's prefill engine has not begun, as far as is known."""
        if request.request_id not in self._consumer:
            return False
        if self._params_cache.waits(request):
            return True
        transfer_params = self._params_cache.take_stream(request)
        if transfer_params is None:
            self._await_no_token(request.request_id, FirstToken.NOT_OFFERED)
            self._recorder.count_reason(HANDOVERS, self._streaming.refusal or Handover.NOT_FOUND)
            return False
        self._pending.waits.append(Wait(request.request_id, transfer_params.remote))
        if request.request_id in self._awaited:
            self._awaited[request.request_id] = request, transfer_params
        self._recorder.count_reason(HANDOVERS, Handover.STREAMED)
        return False

    def plan_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are allocated: queue the load, or only the release where nothing is missing."""
        if not self._is_to_load(request):
            self._plan_reuse(request.request_id, blocks, num_external_tokens)
            return
        load = Load(request.request_id, None, awaited=num_external_tokens > 0)
        try:
            load.remote = self._params_cache.remote(request)
            load.num_tokens = self._params_cache.num_tokens(request)
        except ProtocolError as error:
            # Nothing is sent to a host that untrusted parameters name, nothing of theirs released.
            load.remote, load.refusal = None, str(error)
            load.num_tokens = self._params_cache.most_tokens(request)
            self._tell_other_version(request.request_id, error)
            if isinstance(error, OtherPromptError):
                self._note_other_prompt(request, error)
        self._take_load(request)
        self._trust.forget(request.request_id)
        if not self._has_steps:
            self._send_no_token(request.request_id)
        is_awaited = request.request_id in self._awaited
        load.recomputes = is_awaited or request.request_id in self._recomputed
        if load.awaited:
            # A refused load has its blocks too: vLLM before 0.30 is told of a failure by them.
            self._await(load, blocks, num_external_tokens)
        self._pending.loads.append(load)

    def _send_no_token(self, request_id: str) -> None:
        """Nothing here sends a first token before the engine's steps."""
        if self._first_tokens.pop(request_id, None) is not None:
            self._recorder.count_reason(FIRST_TOKENS, FirstToken.ENGINE)
        self._await_no_token(request_id, FirstToken.ENGINE)

    def _plan_reuse(self, request_id: str, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The same for blocks that another engine has on offer."""
        remote = self._reuse.take(request_id, num_external_tokens)
        if remote is None:
            return
        self._recomputed.add(request_id)
        load = Load(request_id, remote, num_tokens=remote.num_tokens, recomputes=True)
        self._await(load, blocks, num_external_tokens)
        self._pending.loads.append(load)

    def _await(self, load: Load, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request runs when its blocks are filled."""
        load.blocks = self._choose_blocks(load, blocks, num_external_tokens)
        every = [block for group in blocks.blocks for block in group if not block.is_null]
        self._quarantine.note_load(load.request_id, every)
        self._loading[load.request_id] = len(load.block_ids)

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks must be kept, and what the decode engine must
        know."""
        self._first_tokens.pop(request.request_id, None)
        self._recomputed.discard(request.request_id)
        self._arrived.pop(request.request_id, None)
        self._trust.forget(request.request_id)
        self._reuse.forget(request.request_id)
        was_cut = self._prefills.forget(request.request_id)
        was_to_load = self._is_to_load(request)
        if was_to_load:
            self._release_unread(request)
        self._await_no_token(request.request_id, FirstToken.NOT_OFFERED)
        if was_to_load:
            return False, None
        if request.status in FINISHED:
            self._reuse.offer(request, block_ids[0])
        if not (is_for_prefill(params_of(request)) and self._produces):
            return False, None
        return self._prefills.finish(request, block_ids, was_cut=was_cut)

    def forget_computed(self) -> None:
        """Weights or caches have changed: nothing counts that was computed before, here or for
        requests that are here. These are computed here, also those whose loads are under way."""
        loading = self._loading.keys() if self._has_steps else set[str]()
        self._trust.renounce(self._params_cache.known | loading)
        self._recomputed |= loading
        self._prefills.release_all()
        self._reuse.clear()
        while self._first_tokens:
            self._first_tokens.popitem()
            self._recorder.count_reason(FIRST_TOKENS, FirstToken.DIFFERS)
        for request_id, (_, transfer_params) in [*self._awaited.items()]:
            if transfer_params is not None:
                self._await_no_token(request_id, FirstToken.DIFFERS)

    def note_pause(self, *, is_paused: bool) -> None:
        """Whether the engine is paused, told before each step: then it keeps nothing for others,
        and has nothing kept. After a pause in which leases may have ended, requests are computed
        here."""
        if is_paused:
            self._prefills.release_all()
        if self._trust.note_pause(is_paused=is_paused, request_ids=self._params_cache.known):
            self._pending.renews = not is_paused

    def is_at_rest(self) -> bool:
        """Whether the workers know that the engine is paused, and no load is under way."""
        return self._trust.is_paused and not (self.has_news() or self._quarantine.has_loads)

    def take_stats(self) -> dict[str, Any] | None:
        """What was recorded here since the last call, see ``recorder.empty_data``; the gauges are
        those of the whole engine."""
        if self._server is not None:
            self._recorder.count(side_channel_rejects=self._server.take_refused())
        own: dict[str, float] = {
            "quarantined_blocks": len(self._quarantine),
            "held_requests": len(self._prefills.held),
        }
        self._recorder.gauges("scheduler", own)
        data, gauges = self._recorder.take(), self._recorder.take_gauges()
        return {**(data or empty_data()), GAUGES: gauges} if data or gauges else None

    def take_step(self, scheduled: SchedulerOutput) -> StepMetadata:
        """What the workers must know of this step."""
        taken, self._pending = self._pending, StepMetadata()
        loaded = {load.request_id for load in taken.loads}
        taken.waits = [wait for wait in taken.waits if wait.request_id not in loaded]
        taken.given_up = self._quarantine.take_given_up()
        self._prefills.fill_step(taken, scheduled, produces=self._produces)
        return taken

    def has_news(self) -> bool:
        """Whether there is something that the workers have not been told."""
        has_more = self._quarantine.has_given_up or self._prefills.has_news
        return has_more or self._pending != StepMetadata()

    def is_loading(self, request_id: str) -> bool:
        """Whether a request waits for blocks that the workers load, for a prefill engine to
        begin, or for what other engines have of it; the last two end with a notification."""
        waits = self._consumer.is_waiting(request_id) or self._reuse.is_waiting(request_id)
        return waits or self._quarantine.is_loading(request_id)

    def note_outcomes(self, received: set[str], sent: set[str], worker: Any) -> None:
        """Loads ended or are late on the workers, and prefills are no longer kept.

        ``received`` and ``sent`` hold what has ended on all workers: each request is counted once.
        """
        if isinstance(worker, WorkerMetadata):
            self._ends.add(worker.ends)
            self._failed_unread |= worker.unread
            for source, values in worker.gauges.items():
                self._recorder.gauges(source, values)
        unread = self._failed_unread & received | self._trust.take_void(received)
        self._unread += ((one, one in self._recomputed) for one in unread)
        self._failed_unread -= received
        for request_id in received:
            self._quarantine.note_end(request_id)
            self._count_load(request_id, is_unread=request_id in unread)
        for request_id in sent:
            self._count_lease(request_id)
        if isinstance(worker, WorkerMetadata):
            self._quarantine.note_late(worker.late)
            self._quarantine.note_settled(worker.settled)

    def _count_load(self, request_id: str, *, is_unread: bool) -> None:
        num_blocks = self._loading.pop(request_id, 0)
        reason = self._ends.failed.pop(request_id, "")
        self._reuse.note_end(request_id, failed=is_unread or bool(reason))
        if is_unread or reason:
            self._await_no_token(request_id, FirstToken.NOT_OFFERED)
        elif request_id in self._awaited:
            self._loaded.append(request_id)
        if reason:
            self._recorder.count_reason(FAILURES, reason)
        else:
            self._recorder.count(blocks=num_blocks)
            if request_id in self._arrived:
                seconds = time.monotonic() - self._arrived[request_id]
                self._recorder.observe(handover_seconds=seconds)
        self._arrived.pop(request_id, None)

    def _count_lease(self, request_id: str) -> None:
        seconds = self._prefills.note_sent(request_id)
        if seconds is None:
            return
        expired = request_id in self._ends.expired
        self._ends.expired.discard(request_id)
        self._recorder.observe(lease_age_seconds=seconds)
        self._recorder.count(expired_requests=expired)

    def _is_to_load(self, request: Request) -> bool:
        return self._consumes and is_for_decode(params_of(request))

    def _take_load(self, request: Request) -> None:
        """Each request is loaded once: mark it."""
        params = params_of(request)
        assert params is not None  # only called where the parameters ask for a remote prefill
        params["do_remote_prefill"] = False
        self._params_cache.forget(request.request_id)

    def _tell_other_version(self, request_id: str, error: ProtocolError) -> None:
        """Ask a prefill engine of another version to free its blocks: both logs then say why that
        cannot be."""
        if isinstance(error, OtherProtocolError):
            self._pending.loads.append(Load(request_id, error.remote, awaited=False))

    def _note_other_prompt(self, request: Request, error: OtherPromptError) -> None:
        """A request is computed here whose parameters are those of another one."""
        self._recorder.count_reason(FAILURES, "request")
        text = f"request {request.request_id}: KV cache not loaded, computed here: {error}"
        self._log.warning("prompt", text)

    def _choose_blocks(
        self, load: Load, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> tuple[Blocks, ...]:
        return blocks_to_fill(
            self._groups,
            [[block.block_id for block in group] for group in blocks.blocks],
            num_local_tokens=load.num_tokens - num_external_tokens,
            num_tokens=load.num_tokens,
        )

    def _release_unread(self, request: Request) -> None:
        """The request ended before its load was planned: let the prefill engine free its blocks."""
        if self._waits_for_stream(request):
            self._consumer.forget(request.request_id)
            return  # its lease frees them
        try:
            remote = self._params_cache.remote(request)
        except ProtocolError as error:
            self._tell_other_version(request.request_id, error)
            return
        finally:
            self._take_load(request)
        self._pending.loads.append(Load(request.request_id, remote, awaited=False))

    def _refuse_role(self, request: Request, asked: str, role: str) -> None:
        self._log.warning(
            asked,
            f"request {request.request_id} asks for {asked}, which kv_role {role!r} does not do; "
            "it is served as an ordinary request. Check which engine the router sends it to",
        )
