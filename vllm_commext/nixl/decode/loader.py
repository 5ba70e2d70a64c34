"""The decode side of a worker: loads begin, their parts wait for their peers, are read, and end."""

from __future__ import annotations

from collections.abc import Callable

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError, UnsupportedError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.failures import describe_source, handshake_failure, restarted
from vllm_commext.nixl.decode.keep_alive import KeepAlive
from vllm_commext.nixl.decode.loads import Failure, LoadBook, Part
from vllm_commext.nixl.decode.peer import LocalSide, Peer, peer_key
from vllm_commext.nixl.decode.peers import PeerTable
from vllm_commext.nixl.decode.reads import Read, ReadSet, release_notification
from vllm_commext.nixl.geometry.topology import Sources, check_even, sources
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.outcomes import OutcomeBox
from vllm_commext.nixl.requests import Load, RemoteRequest, Wait
from vllm_commext.nixl.transport.agent import NixlAgent


class Loader:
    """Runs one worker's loads.  Owned by one thread.

    Args:
        agent: the agent with the worker's memory registered.
        config: the connector's settings.
        local: this worker's side of a handshake.
        recorder: where counts and timings go.
        outcomes: where ends of loads are reported.
        probe: called with the first peer that is reached.
    """

    def __init__(
        self,
        agent: NixlAgent,
        config: ConnectorConfig,
        local: LocalSide,
        recorder: TransferRecorder,
        outcomes: OutcomeBox,
        probe: Callable[[Peer], None] | None,
    ) -> None:
        self._agent = agent
        self._config = config
        self._local = local
        self._recorder = recorder
        self._outcomes = outcomes
        self._probe = probe
        self._peers = PeerTable(agent, config, local, recorder)
        self._keep_alive = KeepAlive(agent, local.consumer, self._peers)
        self._reads = ReadSet(agent, recorder)
        self._loads = LoadBook()
        # Why loads that the scheduler side has been told of as late are to fail.
        self._late: dict[str, Failure] = {}
        self._sources: dict[int, Sources] = {}
        self._splits = local.layout.splits()
        self._log = RateLimitedLog()

    @property
    def num_reads(self) -> int:
        """Reads under way."""
        return len(self._reads) + self._peers.is_sweeping

    @property
    def num_handshakes(self) -> int:
        """Peers that have been asked and have not answered yet."""
        return self._peers.num_pending

    @property
    def has_duties(self) -> bool:
        """Whether heartbeats or sweeps will be due although nothing is under way."""
        return len(self._keep_alive) > 0 or self._peers.has_sweeps_due

    def poll(self) -> bool:
        """One look at everything under way; whether anything has moved on."""
        answered = self._poll_handshakes()
        self._keep_alive.send_due()
        return self.poll_reads() or answered

    def gauges(self) -> dict[str, float]:
        """What is under way, and the known peers by state."""
        peers = {f"peers/{state}": num for state, num in self._peers.count_states().items()}
        return {"transfers_in_flight": len(self._reads), **peers}

    def close(self) -> None:
        """Forget all peers; no read may be under way."""
        self._peers.close()

    def wait(self, wait: Wait) -> None:
        """Have a request's blocks kept until its load begins, and its peers made ready."""
        waiting = Load(wait.request_id, wait.remote, awaited=False)
        try:
            for part in self._parts(waiting, wait.remote):
                self._keep_alive.begin_wait(part)
        except UnsupportedError:
            return  # the load will fail with the reason

    def begin(self, load: Load) -> None:
        """Start a load: a part for each prefill rank that has to do with it."""
        self._keep_alive.end_wait(load.request_id)
        remote = load.remote
        if remote is None or load.refusal:
            error = ProtocolError(load.refusal or "no remote request")
            self._report(load, Failure("request", error))
            return
        try:
            parts = self._parts(load, remote)
        except UnsupportedError as error:
            self._report(load, Failure("configuration", error))
            return
        self._loads.begin(load, len(parts))
        for part in parts:
            self._keep_alive.begin_load(part)
            self._start(part)

    def _parts(self, load: Load, remote: RemoteRequest) -> list[Part]:
        found = self._sources_of(remote.tp_size)
        ranks = [(rank, bool(load.block_ids)) for rank in found.read]
        ranks += [(rank, False) for rank in found.release_only]
        return [Part(load, remote, rank, found.num_consumers[rank], reads) for rank, reads in ranks]

    def _sources_of(self, tp_size: int) -> Sources:
        if tp_size not in self._sources:
            for split in self._splits:
                check_even(split, tp_size, "the prefill engine's ranks")
            self._sources[tp_size] = sources(self._splits, self._local.layout.rank, tp_size)
        return self._sources[tp_size]

    def _start(self, part: Part) -> None:
        try:
            peer = self._peers.find(peer_key(part), part.remote.incarnation)
            if peer is None:
                self._peers.ask(part)
            else:
                self._read(part, peer)
        except CommextError as error:
            self._close_part(part, handshake_failure(error))

    def _poll_handshakes(self) -> bool:
        ended = self._peers.poll()
        for parts, outcome in ended:
            if isinstance(outcome, Peer):
                self._probe_once(outcome)
            for part in parts:
                if isinstance(outcome, Peer):
                    self._read(part, outcome)
                else:
                    self._close_part(part, handshake_failure(outcome))
        return bool(ended)

    def _probe_once(self, peer: Peer) -> None:
        """Say how fast the first peer can be read."""
        if self._probe is None:
            return
        probe, self._probe = self._probe, None
        try:
            probe(peer)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; nothing depends on it
            logger.warning("self-probe: the peer's memory could not be read: %s", error)

    def _read(self, part: Part, peer: Peer) -> None:
        """Start reading, or only release where nothing is missing."""
        try:
            self._check_peer(part.remote, peer)
            if not peer.serves(part.remote.incarnation):
                self._close_part(part, restarted(part.remote))
                return
            if part.reads and not self._loads.has_failed(part.load):
                self._check_fence(part)
                if self._reads.post(part, peer):
                    return
            self._agent.notify(peer.agent_name, release_notification(self._local, part))
        except CommextError as error:
            self._close_part(part, Failure("request", error))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; only this load has failed
            self._retry(part, peer, error)
        else:
            self._close_part(part)

    def _retry(self, part: Part, peer: Peer, error: Exception) -> None:
        """A peer that cannot be reached may have been restarted: ask it once more."""
        self._peers.doubt(peer, broken=True)
        if part.retried:
            self._close_part(part, Failure("transfer", ProtocolError(f"NIXL: {error}")))
            return
        part.retried = True
        self._recorder.retry()
        logger.info("prefill engine %s: %s; connecting anew", peer.key, error)
        self._start(part)

    @staticmethod
    def _check_peer(remote: RemoteRequest, peer: Peer) -> None:
        tp_size = peer.plan.remote.tp_size
        if remote.tp_size != tp_size:
            raise ProtocolError(
                f"kv_transfer_params: tp_size is {remote.tp_size}, but the prefill engine has "
                f"{tp_size} ranks: let the router pass tp_size on"
            )

    def _check_fence(self, part: Part) -> None:
        if part.remote.fence_slot >= 0:
            return
        text = (
            "the router dropped remote_fence_slot from the request parameters, so blocks that were "
            "freed too early cannot be noticed: let it pass all parameters on"
        )
        if self._config.require_fence:
            raise ProtocolError(text)
        self._log.warning("fence", f"request {part.load.request_id}: {text}")

    def poll_reads(self) -> bool:
        """One look at the reads under way; whether any has moved on."""
        num_fences, num_ended = self._reads.num_fences, 0
        self._peers.sweep()
        for read, end in self._reads.poll():
            num_ended += 1
            failure = None
            if not end.reason:
                self._release(read)
            else:
                failure = Failure(end.reason, ProtocolError(end.text))
            if end.reason == "transfer":
                self._peers.doubt(read.peer, broken=True)
            self._close_part(read.part, failure)
            self._peers.remove_if_unused(read.peer)
        self._note_late_reads()
        return num_ended > 0 or self._reads.num_fences > num_fences

    def _release(self, read: Read) -> None:
        """Tell the prefill worker that its blocks were read."""
        try:
            message = release_notification(self._local, read.part)
            self._agent.notify(read.peer.agent_name, message)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the lease frees the blocks
            self._peers.doubt(read.peer, broken=True)
            source = describe_source(read.part.remote)
            self._log.warning("release", f"{source} was not told: {error}")

    def _note_late_reads(self) -> None:
        for read in self._reads.take_late(self._config.transfer_timeout):
            request_id = read.part.load.request_id
            failure = self._late.setdefault(request_id, self._lateness(read))
            logger.warning(
                "request %s: the read from prefill engine %s is not done: %s; it fails as soon as "
                "its blocks are out of use",
                request_id,
                read.peer.key,
                failure.error,
            )
            self._peers.doubt(read.peer, broken=False)
            self._outcomes.late(request_id)

    def _lateness(self, read: Read) -> Failure:
        if read.peer.lost:
            return Failure("transfer", ProtocolError("the prefill engine has gone or restarted"))
        limit = self._config.transfer_timeout
        return Failure("timeout", CommextTimeoutError(f"not read within {limit:g} s"))

    def give_up(self, request_id: str) -> None:
        """End a late load; its reads may go on, into blocks that the scheduler keeps out of use."""
        given_up = Failure("timeout", CommextTimeoutError("given up by the scheduler"))
        failure = self._late.pop(request_id, given_up)
        load = self._loads.give_up(request_id, failure)
        if load is None:
            self._outcomes.settled(request_id)
            return
        self._report(load, failure)
        self._reads.give_up(request_id)
        for part in self._peers.withdraw(request_id):
            self._close_part(part, failure)

    def _close_part(self, part: Part, failure: Failure | None = None) -> None:
        self._keep_alive.end(part)
        ended = self._loads.close(part, failure)
        if ended is None:
            return
        self._late.pop(part.load.request_id, None)
        if ended.given_up:
            self._outcomes.settled(part.load.request_id)
        else:
            self._report(part.load, ended.failure)

    def _report(self, load: Load, failure: Failure | None) -> None:
        """Tell the scheduler side how a load ended."""
        if failure is not None:
            self._log_failure(load, failure)
        if not load.awaited:
            return
        self._outcomes.received(load.request_id, failed=failure is not None)

    def _log_failure(self, load: Load, failure: Failure) -> None:
        request = f"request {load.request_id} of decode engine {self._local.engine_id!r}"
        source, error = describe_source(load.remote), failure.error
        if load.awaited:
            self._recorder.failure(failure.reason)
            text = f"{request}: KV cache not loaded from {source}: {error}"
            self._log.warning(failure.reason, text)
        else:
            self._log.warning("release", f"{request}: {source} was not told to free it: {error}")
