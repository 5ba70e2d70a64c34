"""The one thread that owns a worker's NIXL agent.

Handshakes, reads, polling and notifications all happen here, so that the engine's thread never
waits for them: it submits small commands and takes outcomes, once a step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_commext.errors import CommextError, CommextTimeoutError, ProtocolError, UnsupportedError
from vllm_commext.nixl import wire
from vllm_commext.nixl.agent import NixlAgent
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.leases import LeaseLedger
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.peers import LocalSide, Peer, PeerTable
from vllm_commext.nixl.reads import Read, ReadSet, release_notification
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import Hold, Load, Outcomes, RemoteRequest
from vllm_commext.nixl.topology import source_rank

BUSY_WAIT_SECONDS = 50e-6
"""First wait between two looks at reads under way; doubles while nothing changes."""
PENDING_WAIT_SECONDS = 1e-3
LEASED_WAIT_SECONDS = 2e-3
IDLE_WAIT_SECONDS = 0.1
EARLY_RELEASE_SECONDS = 60.0
"""How long a release may come before the scheduler's word that the request has finished."""
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class GiveUp:
    """The scheduler has taken a late load's blocks out of use: report it as failed now."""

    request_id: str


Command = Load | Hold | GiveUp


class TransferThread:
    """Runs one worker's transfers.

    Args:
        agent: the agent with the worker's memory registered; the thread owns it from ``start`` on.
        config: the connector's settings.
        local: this worker's side of a handshake.
        recorder: where counts and timings go.
        on_start: called once in the thread, before anything else (selects the GPU).
    """

    def __init__(
        self,
        agent: NixlAgent,
        config: ConnectorConfig,
        local: LocalSide,
        recorder: TransferRecorder,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._agent = agent
        self._config = config
        self._local = local
        self._recorder = recorder
        self._on_start = on_start
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._outcomes = Outcomes()
        self._peers = PeerTable(agent, config, local, recorder)
        self._reads = ReadSet(agent, local, recorder)
        self._leases = LeaseLedger()
        self._fences: dict[str, tuple[int, int]] = {}
        self._log = RateLimitedLog()
        self._wait_seconds = IDLE_WAIT_SECONDS
        self._thread = threading.Thread(target=self._run, name="commext-transfer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Hand over a command; returns at once."""
        self._commands.put(command)

    def take_outcomes(self) -> Outcomes:
        """What ended since the last call."""
        with self._lock:
            taken, self._outcomes = self._outcomes, Outcomes()
        return taken

    def stop(self) -> None:
        """End the thread and give back what the agent holds; bounded by ``STOP_SECONDS``."""
        if not self._thread.is_alive():
            return
        self._commands.put(None)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the transfer thread did not end within %g s", STOP_SECONDS)

    def _run(self) -> None:
        self._on_start()
        running = True
        while running:
            try:
                running = self._take_commands()
                self._turn()
            except Exception:  # noqa: BLE001 the thread outlives any fault; logged with its trace
                logger.exception("a turn of the transfer thread failed; it goes on")
                time.sleep(PENDING_WAIT_SECONDS)
        self._close()

    def _turn(self) -> None:
        progressed = self._poll_handshakes()
        progressed |= self._poll_reads()
        self._take_notifications()
        self._end_leases()
        self._wait_seconds = self._next_wait(progressed)

    def _next_wait(self, progressed: bool) -> float:
        if len(self._reads):
            if progressed or self._wait_seconds > PENDING_WAIT_SECONDS:
                return BUSY_WAIT_SECONDS
            return min(2 * self._wait_seconds, PENDING_WAIT_SECONDS)
        if self._peers.num_pending:
            return PENDING_WAIT_SECONDS
        return LEASED_WAIT_SECONDS if len(self._leases) else IDLE_WAIT_SECONDS

    def _take_commands(self) -> bool:
        """Wait for a command, then take all there are; False where the thread is to end."""
        try:
            command = self._commands.get(timeout=self._wait_seconds)
            while command is not None:
                self._execute(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _execute(self, command: Command) -> None:
        if isinstance(command, Load):
            self._begin(command)
        elif isinstance(command, GiveUp):
            self._give_up(command.request_id)
        else:
            self._hold(command)

    # The decode side: a load begins, waits for its peer, is read, and ends.

    def _begin(self, load: Load) -> None:
        remote = load.remote
        if remote is None or load.refusal:
            self._fail(load, "request", ProtocolError(load.refusal or "no remote request"))
            return
        try:
            rank = source_rank(self._local.shape, remote.tp_size)
            peer = self._peers.find(remote)
            if peer is None:
                self._peers.ask(load, remote, rank)
            else:
                self._read(load, remote, peer)
        except UnsupportedError as error:
            self._fail(load, "configuration", error)
        except CommextError as error:
            self._fail(load, "handshake", error)
        except Exception as error:  # noqa: BLE001 a request may hold anything; only this load fails
            self._fail(load, "handshake", ProtocolError(f"cannot ask the engine: {error}"))

    def _poll_handshakes(self) -> bool:
        ended = self._peers.poll()
        for loads, outcome in ended:
            for load in loads:
                if isinstance(outcome, Peer) and load.remote is not None:
                    self._read(load, load.remote, outcome)
                elif isinstance(outcome, CommextError):
                    self._fail(load, "handshake", outcome)
        return bool(ended)

    def _read(self, load: Load, remote: RemoteRequest, peer: Peer) -> None:
        """Start reading, or only release where nothing is missing."""
        try:
            self._check_start(remote, peer)
            if load.local_block_ids:
                self._note_missing_fence(load, remote)
                self._reads.post(load, remote, peer)
            else:
                self._agent.notify(peer.agent_name, release_notification(self._local, remote))
                self._end(load)
        except CommextError as error:
            self._fail(load, "request", error)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; only this load has failed
            self._retry(load, peer, error)

    def _retry(self, load: Load, peer: Peer, error: Exception) -> None:
        """A peer that cannot be reached may have been restarted: ask it once more."""
        self._peers.forget(peer)
        if load.retried:
            self._fail(load, "transfer", ProtocolError(f"NIXL: {error}"))
            return
        load.retried = True
        logger.info("prefill engine %s: %s; connecting anew", peer.key, error)
        self._begin(load)

    @staticmethod
    def _check_start(remote: RemoteRequest, peer: Peer) -> None:
        if not peer.serves(remote):
            raise ProtocolError(
                f"the prefill engine {remote.engine_id!r} was restarted since it computed this "
                "request: its blocks are gone"
            )

    def _note_missing_fence(self, load: Load, remote: RemoteRequest) -> None:
        if remote.fence_slot < 0:
            self._log.warning(
                "fence",
                f"request {load.request_id}: the router dropped remote_fence_slot from the request "
                "parameters, so blocks that were freed too early cannot be noticed: let it pass "
                "all parameters on",
            )

    def _poll_reads(self) -> bool:
        progressed = False
        for read, end in self._reads.poll():
            progressed = True
            if not end.reason:
                self._release(read)
            elif end.reason == "transfer":
                self._peers.forget(read.peer)
            if read.given_up:
                self._report_settled(read.load.request_id)
            elif end.reason:
                self._fail(read.load, end.reason, ProtocolError(end.text))
            else:
                self._end(read.load)
            self._peers.remove_if_unused(read.peer)
        self._note_late_reads()
        return progressed

    def _release(self, read: Read) -> None:
        """Tell the prefill worker that its blocks were read."""
        try:
            message = release_notification(self._local, read.remote)
            self._agent.notify(read.peer.agent_name, message)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the lease frees the blocks
            self._peers.forget(read.peer)
            self._log.warning("release", f"{self._source(read.remote)} was not told: {error}")

    def _note_late_reads(self) -> None:
        limit = self._config.transfer_timeout
        for read in self._reads.take_late(limit):
            logger.warning(
                "request %s: the read from prefill engine %s is not done after %g s; it fails as "
                "soon as its blocks are out of use",
                read.load.request_id,
                read.peer.key,
                limit,
            )
            self._peers.forget(read.peer)
            with self._lock:
                self._outcomes.late.add(read.load.request_id)

    def _give_up(self, request_id: str) -> None:
        """End a late load; its read may go on, into blocks that the scheduler keeps out of use."""
        late = CommextTimeoutError(f"not read within {self._config.transfer_timeout:g} s")
        read = self._reads.find(request_id)
        if read is not None:
            read.given_up = True
            self._fail(read.load, "timeout", late)
            return
        waiting = self._peers.withdraw(request_id)
        if waiting is not None:
            self._fail(waiting, "timeout", late)
        self._report_settled(request_id)

    def _fail(self, load: Load, reason: str, error: CommextError) -> None:
        request = f"request {load.request_id} of decode engine {self._local.engine_id!r}"
        source = self._source(load.remote)
        if load.awaited:
            self._recorder.failure(reason)
            self._log.warning(reason, f"{request}: KV cache not loaded from {source}: {error}")
        else:
            self._log.warning("release", f"{request}: {source} was not told to free it: {error}")
        self._end(load, failed=True)

    @staticmethod
    def _source(remote: RemoteRequest | None) -> str:
        if remote is None:
            return "an unknown prefill engine"
        return (
            f"prefill engine {remote.engine_id!r} at {remote.host}:{remote.port} (request "
            f"{remote.request_id} there)"
        )

    def _end(self, load: Load, *, failed: bool = False) -> None:
        if not load.awaited:
            return
        with self._lock:
            self._outcomes.received.add(load.request_id)
            if failed:
                self._outcomes.failed.add(load.request_id)

    def _report_settled(self, request_id: str) -> None:
        with self._lock:
            self._outcomes.settled.add(request_id)

    # The prefill side: blocks are kept until they are released or their lease ends.

    def _hold(self, hold: Hold) -> None:
        self._fences[hold.request_id] = (hold.fence_slot, hold.fence_ticket)
        if self._leases.hold(hold.request_id, time.monotonic(), hold.lease_seconds):
            self._report_sent(hold.request_id)

    def _take_notifications(self) -> None:
        now = time.monotonic()
        for message in self._agent.notifications():
            try:
                released = wire.decode_notification(message)
            except ProtocolError as error:
                self._recorder.leases(expired=0, unmatched=1)
                self._log.warning("notification", f"ignored a NIXL notification: {error}")
                continue
            request_id = released.request_id
            if self._leases.release(request_id, released.consumer, released.num_consumers, now):
                self._report_sent(request_id)

    def _end_leases(self) -> None:
        for request_id in self._leases.expire(time.monotonic(), EARLY_RELEASE_SECONDS):
            self._report_sent(request_id)
            self._log.warning(
                "lease",
                f"request {request_id}: its blocks were kept for "
                f"{self._config.kv_lease_duration:g} s and not read by all consumers; freed. Was "
                "the decode request sent?",
            )
        counts = self._leases.take_counts()
        if counts.expired or counts.unmatched:
            self._recorder.leases(expired=counts.expired, unmatched=counts.unmatched)

    def _report_sent(self, request_id: str) -> None:
        """The blocks may be freed: first raise the epoch, so that no reader relies on them."""
        slot, ticket = self._fences.pop(request_id)
        if slot >= 0:
            self._agent.board.end(slot, ticket)
        with self._lock:
            self._outcomes.sent.add(request_id)

    def _close(self) -> None:
        """No agent is taken down under a read: that could end the peer's process."""
        deadline = time.monotonic() + STOP_SECONDS / 2
        while len(self._reads) and time.monotonic() < deadline:
            self._poll_reads()
            time.sleep(PENDING_WAIT_SECONDS)
        if len(self._reads):
            logger.warning("%d reads are still under way at the end", len(self._reads))
            return
        self._peers.close()
        self._agent.close()
