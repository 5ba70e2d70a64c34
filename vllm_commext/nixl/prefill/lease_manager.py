"""The prefill side of a worker: blocks are kept until they are released or their lease ends."""

import time

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.prefill.leases import Beat, LeaseLedger
from vllm_commext.nixl.requests import CompletionQueue, Hold
from vllm_commext.nixl.stream.progress import WorkerTables
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire.messages import (
    KeepAlive,
    Released,
    decode_notification,
    short_id,
)

EARLY_RELEASE_SECONDS = 60.0
"""How long a release may come before the scheduler's word that the request has finished."""


class LeaseManager:
    """Keeps one worker's finished prefills.  Owned by one thread."""

    def __init__(
        self,
        agent: NixlAgent,
        tables: WorkerTables,
        config: ConnectorConfig,
        recorder: TransferRecorder,
        outcomes: CompletionQueue,
    ) -> None:
        self._agent = agent
        self._tables = tables
        self._config = config
        self._recorder = recorder
        self._outcomes = outcomes
        # By what notifications call the requests.
        self._leases = LeaseLedger(config.kv_lease_max_duration)
        self._holds: dict[str, Hold] = {}
        self._expired: set[str] = set()
        # Ended, and not reported yet: an error in the midst of that must not keep their blocks.
        self._unsent: list[str] = []
        self._log = RateLimitedLog()

    def __len__(self) -> int:
        return len(self._leases)

    def hold(self, hold: Hold) -> None:
        name = short_id(hold.request_id)
        self._holds[name] = hold
        is_read = hold.lease_seconds > 0
        now = time.monotonic()
        if not is_read or self._leases.hold(name, now, hold.lease_seconds):
            self._report_sent(name)

    def release(self, request_id: str) -> None:
        if self._leases.drop(request_id):
            self._report_sent(request_id)

    def take_notifications(self) -> None:
        """Take in readers' notifications; one that fails is lost alone."""
        now = time.monotonic()
        for message in self._agent.notifications():
            try:
                self._take(message, now)
            except Exception:  # noqa: BLE001 one message's error is no other's
                self._log.exception(
                    "take", "a NIXL notification was lost; the lease frees the blocks"
                )

    def _take(self, message: bytes, now: float) -> None:
        try:
            notification = decode_notification(message)
        except ProtocolError as error:
            self._recorder.count(unmatched_notifications=1)
            self._log.warning("notification", f"ignored a NIXL notification: {error}")
            return
        if isinstance(notification, Released):
            self._release(notification, now)
        else:
            self._extend(notification, now)

    def _release(self, released: Released, now: float) -> None:
        request_id = released.request_id
        if self._leases.release(request_id, released.consumer, released.num_consumers, now):
            self._report_sent(request_id)

    def _extend(self, told: KeepAlive, now: float) -> None:
        beat = Beat(told.consumer, told.sender, told.sequence)
        for request_id in told.request_ids:
            self._leases.extend(request_id, beat, now)

    def end_leases(self) -> None:
        self._report_unsent()
        ended = self._leases.expire(time.monotonic(), EARLY_RELEASE_SECONDS)
        for request_id, seconds in ended.items():
            self._expired.add(request_id)
            self._report_sent(request_id)
            self._log.warning(
                "lease",
                f"request {request_id}: its blocks were kept for {seconds:.3g} s and not read by "
                "all consumers; freed. Was the decode request sent, and is its engine up?",
            )
        counts = self._leases.take_counts()
        if counts:
            self._recorder.count(
                unmatched_notifications=counts.unmatched,
                heartbeats=counts.extended,
                ignored_heartbeats=counts.ignored_beats,
            )

    def _report_sent(self, request_id: str) -> None:
        """The blocks may be freed: first replace the nonce, so that no reader relies on them."""
        self._unsent.append(request_id)
        self._report_unsent()

    def _report_unsent(self) -> None:
        """What fails here is tried again in the next turn."""
        for name in list(self._unsent):
            hold = self._holds[name]
            try:
                self._tables.end(hold)
            except Exception:  # noqa: BLE001 one request's error is no other's
                self._log.exception("report", f"request {name}: its fence was not changed yet")
                continue
            self._unsent.remove(name)
            del self._holds[name]
            if name in self._expired:
                self._expired.discard(name)
                self._note_expired(hold.request_id)
            self._outcomes.sent(hold.request_id)

    def _note_expired(self, request_id: str) -> None:
        try:
            self._recorder.note_expired(request_id)
        except Exception:  # noqa: BLE001 nothing depends on it
            self._log.exception("report", f"request {request_id}: its expiry was not counted")
