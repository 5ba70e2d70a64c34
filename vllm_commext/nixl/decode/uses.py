"""Remote requests from their first use by this engine to their release, and how each use ended."""

import contextlib
import functools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from vllm_commext.errors import CommextError, ProtocolError, UnsupportedError
from vllm_commext.nixl.decode.links import Link, LocalWorker
from vllm_commext.nixl.decode.peers import PeerTable
from vllm_commext.nixl.decode.transfers import (
    Failure,
    Identity,
    RemotePrefill,
    ShardRead,
    SourceWorker,
    Use,
    describe_source,
    failure_of,
    identity,
    remote_of,
)
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import (
    CompletionQueue,
    FailedLoad,
    Load,
    PeerKey,
    RemoteRequest,
    Wait,
)
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.messages import Released, short_id

PARTS_OF_LEASE = 6  # heartbeats within one lease
RETRY_SECONDS = 0.1  # until a peer that is not ready is looked at again
MAX_IDS = 100  # in one message: all of the longest that there may be still fit


class KeepAlive:
    """Keeps requests alive at the prefill workers that hold them.  Owned by one thread.

    Args:
        used_at: gives the requests, as notifications call them, that are used at a peer.
    """

    def __init__(
        self,
        agent: NixlAgent,
        consumer: str,
        peers: PeerTable,
        used_at: Callable[[PeerKey], Iterator[str]],
    ) -> None:
        self._agent = agent
        self._consumer = short_id(consumer)
        self._peers = peers
        self._used_at = used_at
        self._next: dict[PeerKey, float] = {}
        self.is_on = True

    def watch(self, use: Use) -> None:
        """A request waits for its load, so its lease may have begun long ago, or is about to be
        read, which most often has ended before the first heartbeat is due."""
        now = time.monotonic()
        for worker in use.workers if use.prefill.remote.is_kept else ():
            key = use.prefill.sources[worker].key
            delay = 0.0 if use.load is None else _interval(self._peers.find(key))
            self._next[key] = min(self._next.get(key, math.inf), now + delay)

    def send_due(self) -> None:
        now = time.monotonic()
        for key in [key for key, when in self._next.items() if self.is_on and when <= now]:
            names = self._used_at(key)
            first = next(names, None)
            if first is None:
                del self._next[key]
                continue
            link = self._ready(key)
            self._next[key] = now + _interval(link)
            if link is not None and link.lease_seconds:
                self._send(link, [*dict.fromkeys((first, *names))])

    def _ready(self, key: PeerKey) -> Link | None:
        with contextlib.suppress(CommextError):  # else the load will fail with the reason
            self._peers.prepare(key)
        return self._peers.find(key)

    def _send(self, link: Link, names: list[str]) -> None:
        try:
            for begin in range(0, len(names), MAX_IDS):
                part = names[begin : begin + MAX_IDS]
                message = wire.KeepAlive(consumer=self._consumer, request_ids=part)
                self._agent.notify(link.agent_name, wire.encode(message))
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer is asked again
            logger.info("prefill engine %s takes no heartbeats: %s", link.key, error)
            self._peers.doubt(link, broken=True)


def _interval(link: Link | None) -> float:
    return (link.lease_seconds / PARTS_OF_LEASE if link is not None else 0.0) or RETRY_SECONDS


def _can_be_sent(name: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        name.encode()
        return True
    return False


LOST = ("expired", "timeout", "transfer")
"""Failures of a load whose prefill engine is lost, or lets go of it: what was proven before is
right."""


class Uses:
    """Requests that wait for loads or are loaded.  Owned by one thread."""

    def __init__(
        self,
        agent: NixlAgent,
        local: LocalWorker,
        peers: PeerTable,
        recorder: TransferRecorder,
        outcomes: CompletionQueue,
    ) -> None:
        self._agent = agent
        self._local = local
        self._consumer = short_id(local.consumer)
        self._peers = peers
        self.keep_alive = KeepAlive(agent, local.consumer, peers, self._used_at)
        self._recorder = recorder
        self._outcomes = outcomes
        self._sources = functools.cache(local.sources)
        self._prefills: dict[Identity, RemotePrefill] = {}
        # Transfers to be released, by the time when they are.
        self._closing: deque[tuple[float, RemotePrefill]] = deque()
        self._uses: dict[str, Use] = {}
        self.refusal: Exception | None = None
        self._log = RateLimitedLog()

    def __len__(self) -> int:
        return len(self._prefills)

    def get(self, request_id: str) -> Use | None:
        return self._uses.get(request_id)

    def workers(self, tp_size: int, pp_size: int) -> list[int]:
        return list(self._sources(tp_size, pp_size).num_consumers)

    def wait(self, wait: Wait) -> None:
        if wait.request_id not in self._uses:
            with contextlib.suppress(UnsupportedError):  # its load will fail with the reason
                self.keep_alive.watch(self._use(self._prefill_of(wait.remote), wait.request_id))

    def begin(self, load: Load, start: Callable[[ShardRead], None]) -> None:
        known = self._uses.get(load.request_id)
        try:
            prefill = known.prefill if known is not None else self._prefill_of(remote_of(load))
            use = self._use(prefill, load.request_id)
            if load.refusal:
                use.failure = Failure("request", ProtocolError(load.refusal))
            if self.refusal is not None:
                use.failure = failure_of(self.refusal, "internal")
            shards = prefill.begin(load)
        except Exception as error:  # noqa: BLE001 one load's error is no other's
            self.report(load, failure_of(error, "request"))
            return
        self.keep_alive.watch(use)
        for shard in shards:
            start(shard)
        if not shards and prefill.end(use):
            self._end(use, load)
        self._release(prefill, time.perf_counter())

    def close(self, shard: ShardRead, failure: Failure | None = None) -> None:
        use, prefill = shard.use, shard.use.prefill
        if prefill.close(shard, failure):
            self._end(use, shard.load)
        self._release(prefill, time.perf_counter())

    @staticmethod
    def check_size(shard: ShardRead, link: Link) -> None:
        """Refuse a wrong number of workers; raises ProtocolError."""
        remote, there = shard.remote, link.plan.remote
        if (remote.tp_size, remote.pp_size) != (there.tp_size, there.pp_size):
            raise ProtocolError(
                f"kv_transfer_params: tp_size is {remote.tp_size} and pp_size {remote.pp_size}, "
                f"but the prefill engine has {there.tp_size} ranks in {there.pp_size} stages: let "
                "the router pass both on"
            )

    def send_release(self, prefill: RemotePrefill, source: SourceWorker) -> None:
        """Tell a prefill worker that this one needs the request's blocks no longer, now or as soon
        as it is ready."""
        if not prefill.remote.is_kept:
            return
        remote, agent_name = prefill.remote, ""
        try:
            released = Released(
                request_id=short_id(remote.request_id),
                consumer=self._consumer,
                num_consumers=source.num_consumers,
            )
            message = wire.encode(released)  # what cannot be written says nothing of the peer
            agent_name = self._agent_of(prefill, source)
            if agent_name:
                self._agent.notify(agent_name, message)
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the lease frees the blocks
            link = self._peers.find(source.key)
            self._peers.forget(agent_name)
            if agent_name and link is not None:
                self._peers.doubt(link, broken=True)
            if agent_name and not source.is_retried:
                source.is_retried = True
                self.send_release(prefill, source)
                return
            text = f"{describe_source(remote)} was not told that its blocks are not needed: {error}"
            self._log.warning("release", text)

    def release_due(self) -> None:
        now = time.perf_counter()
        while self._closing and self._closing[0][0] <= now:
            self._release(self._closing.popleft()[1], now)

    def release_all(self) -> None:
        for prefill in list(self._prefills.values()):
            self._release(prefill, sys.float_info.max)

    def report(self, load: Load, failure: Failure | None, num_read: int = 0) -> None:
        if not load.awaited:
            return
        ended = None
        try:
            if failure is not None:  # its line comes before the outcome that it explains
                ended = FailedLoad(failure.reason, num_read if failure.reason in LOST else 0)
                self._explain(load, failure, ended.num_read)
        finally:
            self._outcomes.note(load.request_id, "received", failure=ended)

    def _use(self, prefill: RemotePrefill, request_id: str) -> Use:
        known = self._uses.get(request_id)
        if known is None:
            known = self._uses[request_id] = prefill.wait(request_id)
        return known

    def _prefill_of(self, remote: RemoteRequest) -> RemotePrefill:
        key = identity(remote)
        if key not in self._prefills:
            self._prefills[key] = RemotePrefill(
                remote, self._sources(remote.tp_size, remote.pp_size)
            )
        return self._prefills[key]

    def _used_at(self, key: PeerKey) -> Iterator[str]:
        """Requests that are used at a peer, but those that no message can name."""
        for prefill in self._prefills.values():
            if prefill.remote.is_kept and prefill.is_used_at(key):
                name = short_id(prefill.remote.request_id)
                if _can_be_sent(name):
                    yield name

    def _end(self, use: Use, load: Load) -> None:
        self._uses.pop(use.request_id, None)
        if use.is_given_up:
            self._outcomes.note(use.request_id, "settled")
        else:
            self.report(load, use.failure, use.num_read)

    def _release(self, prefill: RemotePrefill, now: float) -> None:
        for source in prefill.take_due(now):
            self.send_release(prefill, source)
        if prefill.next_release < math.inf:
            self._closing.append((prefill.next_release, prefill))
        if prefill.is_over:
            self._prefills.pop(identity(prefill.remote), None)

    def _agent_of(self, prefill: RemotePrefill, source: SourceWorker) -> str:
        peer = self._peers.get(source.key)
        if peer is not None and peer.has_closed:
            return ""
        peer = self._peers.prepare(source.key, prefill.remote.incarnation)
        if peer.ready_link is None:
            peer.releases.append((prefill, source))
        elif peer.ready_link.serves(prefill.remote.incarnation):
            return peer.ready_link.agent_name
        return ""

    def _explain(self, load: Load, failure: Failure, num_read: int) -> None:
        brought = f"; {num_read} of {load.num_tokens} tokens are here" if num_read else ""
        self._log.warning(
            failure.reason,
            f"request {load.request_id} of decode engine {self._local.engine_id!r}: "
            f"KV cache not loaded from {describe_source(load.remote)}: {failure.text}{brought}",
        )
