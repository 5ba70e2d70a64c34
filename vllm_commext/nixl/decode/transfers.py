"""A worker's transfers for one remote request, in one object.

Pure.  Several requests of this engine may use one remote request (``n`` > 1, or a router that uses
parameters again).  Each of these uses is read in shards, one for each prefill worker involved, and
ends when all of its shards have: blocks into which a shard is still being read must not be given to
anybody else, even if another shard has failed.  A use that took too long is given up: it counts as
failed at once, and as settled when its last shard has ended.  A prefill worker is released when no
use needs it any more.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_commext.errors import CommextError, ProtocolError, UnsupportedError
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.geometry.topology import Sources
from vllm_commext.nixl.requests import Load, PeerKey, RemoteRequest

if TYPE_CHECKING:
    from vllm_commext.nixl.stream.cursor import Cursor

RELEASE_DELAY_SECONDS = 0.25
"""From the end of the last load of a remote request to its release: other uses of it, such as the
further samples of a request with ``n`` > 1, may follow one by one."""


@dataclass(frozen=True)
class Failure:
    """A load's failure; ``reason`` is one of ``recorder.FAILURE_REASONS``."""

    reason: str
    error: Exception

    @property
    def text(self) -> str:
        if self.reason == "internal":
            return f"an error in the connector's own code: {self.error!r}"
        return str(self.error)


Identity = tuple[str, str, str, int, int, int, str]


def identity(remote: RemoteRequest) -> Identity:
    sizes = remote.tp_size, remote.pp_size
    return remote.engine_id, remote.incarnation, remote.host, remote.port, *sizes, remote.request_id


def failure_of(error: Exception, reason: str) -> Failure:
    if isinstance(error, UnsupportedError):
        return Failure("configuration", error)
    return Failure(reason if isinstance(error, CommextError) else "internal", error)


def restarted(remote: RemoteRequest) -> Failure:
    text = (
        f"the prefill engine {remote.engine_id!r} was restarted since it computed this request: "
        "its blocks are gone"
    )
    return Failure("expired", ProtocolError(text))


def remote_of(load: Load) -> RemoteRequest:
    """Find where a load's blocks are; raises ProtocolError."""
    if load.remote is None:
        raise ProtocolError(load.refusal or "no remote request")
    return load.remote


def describe_source(remote: RemoteRequest | None) -> str:
    if remote is None:
        return "an unknown prefill engine"
    return (
        f"prefill engine {remote.engine_id!r} at {remote.host}:{remote.port} (request "
        f"{remote.request_id} there)"
    )


@dataclass
class SourceWorker:
    """One prefill worker of a remote request.

    Attributes:
        release_at: when it is to be released, in seconds of ``time.perf_counter``; infinite while
            it is used, and after the release.
        is_gone: it keeps nothing for the request, as far as is known.
        is_retried: it could not be told that it is released, and is told again.
    """

    key: PeerKey
    num_consumers: int
    num_users: int = 0
    release_at: float = math.inf
    is_gone: bool = False
    is_retried: bool = False


@dataclass(eq=False)
class Use:
    """One request of this engine that needs the remote request.

    Attributes:
        lateness: why it is to fail, where the scheduler side has been told that it is late.
        is_given_up: it has been reported as failed and has only to settle.
    """

    request_id: str
    prefill: RemotePrefill
    load: Load | None = None
    workers: set[int] = field(default_factory=set[int])
    failure: Failure | None = None
    lateness: Failure | None = None
    is_given_up: bool = False
    shards: list[ShardRead] = field(default_factory=list["ShardRead"])

    @property
    def num_read(self) -> int:
        return min((one.cursor.num_read if one.cursor else 0 for one in self.shards), default=0)


@dataclass(eq=False)
class ShardRead:
    """One use's read from one prefill worker.

    Attributes:
        retried: it was tried before, over a connection that turned out to be broken.
        cursor: how far it has come, where it is read while its prompt is computed.
    """

    use: Use
    load: Load
    worker: int
    key: PeerKey
    retried: bool = False
    begun: float = field(default_factory=time.perf_counter)
    pairs: tuple[Link, Pairs] | None = None
    cursor: Cursor | None = None

    @property
    def remote(self) -> RemoteRequest:
        return self.load.remote or self.use.prefill.remote


class RemotePrefill:
    """One remote request."""

    def __init__(self, remote: RemoteRequest, found: Sources) -> None:
        self.remote = remote
        self._read = found.read
        self.sources = {
            worker: SourceWorker(
                PeerKey(remote.engine_id, remote.host, remote.port, worker), num_consumers
            )
            for worker, num_consumers in found.num_consumers.items()
        }
        self.uses: dict[str, Use] = {}

    def is_used_at(self, key: PeerKey) -> bool:
        source = self.sources.get(key.number)
        return source is not None and source.key == key and source.num_users > 0

    @property
    def next_release(self) -> float:
        return min((source.release_at for source in self.sources.values()), default=math.inf)

    @property
    def is_over(self) -> bool:
        return not self.uses and self.next_release == math.inf

    def wait(self, request_id: str) -> Use:
        use = self.uses[request_id] = Use(request_id, self, workers=set(self.sources))
        for source in self.sources.values():
            source.num_users += 1
            source.release_at = math.inf
        return use

    def begin(self, load: Load) -> list[ShardRead]:
        use = self.uses.get(load.request_id) or self.wait(load.request_id)
        use.load = load
        wanted = self._read if load.block_ids else ()
        for worker in use.workers - set(wanted):
            self._drop(use, worker, 0.0)
        use.shards = [ShardRead(use, load, worker, self.sources[worker].key) for worker in wanted]
        return use.shards

    def close(self, shard: ShardRead, failure: Failure | None = None) -> bool:
        use = shard.use
        use.failure = use.failure or failure
        if failure is not None and failure.reason == "expired":
            self.sources[shard.worker].is_gone = True
        self._drop(use, shard.worker, 0.0 if use.failure else RELEASE_DELAY_SECONDS)
        return self.end(use)

    def end(self, use: Use) -> bool:
        if use.workers or use.load is None:
            return False
        return self.uses.pop(use.request_id, None) is not None

    def _drop(self, use: Use, worker: int, delay: float) -> None:
        if worker not in use.workers:
            return
        use.workers.discard(worker)
        source = self.sources[worker]
        source.num_users -= 1
        if source.num_users == 0:
            source.release_at = time.perf_counter() + delay

    def take_due(self, now: float) -> list[SourceWorker]:
        due = [source for source in self.sources.values() if source.release_at <= now]
        for source in due:
            source.release_at = math.inf
        return [source for source in due if not source.is_gone]
