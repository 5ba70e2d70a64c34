"""NIXL's agents and prepared lists for prefill workers, each released after its last user."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from vllm_commext.nixl.geometry.layout import CacheLayout, UInt64Array, describe_place
from vllm_commext.nixl.geometry.plan import Pairs, ReadPlan
from vllm_commext.nixl.geometry.topology import Sources, Split, check_even, over_stages, sources
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.mapped import MappedReader, Mapper
from vllm_commext.nixl.requests import PeerKey
from vllm_commext.nixl.stream.progress import WorkerTables
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.posting import NixlReader, Reader
from vllm_commext.nixl.transport.tables import RemoteTable
from vllm_commext.nixl.wire.description import STREAM_HEADERS, STREAM_PIECES, WorkerDescription

_log = RateLimitedLog()


class Counted:
    """A resource that is made with one user, and given back after the last one."""

    num_users = 1
    _give_back: Callable[[], None]

    def hold(self) -> Self:
        self.num_users += 1
        return self

    def drop(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self._give_back()


class RefCounted(Counted):
    def __init__(self, value: Any, give_back: Callable[[], None]) -> None:
        self.value = value
        self._give_back = partial(run_logged, give_back)


def run_logged(give_back: Callable[[], None]) -> None:
    try:
        give_back()
    except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer may be gone
        _log.warning("give back", f"NIXL failed to release a removed peer's resources: {error}")


MAX_KEPT = 256  # unused agents that are kept, for workers that may be needed again


@dataclass(frozen=True)
class LocalWorker:
    """This worker, as far as a handshake compares it with a peer.

    Attributes:
        other_splits: ways in which something is dealt out to the ranks of other pipeline stages.
        mapper: opens the memory of workers on this host, None where everything is read by NIXL.
    """

    engine_id: str
    facts: dict[str, str]
    layout: CacheLayout
    memory_type: str = "DRAM"
    device_id: int = 0
    other_splits: frozenset[Split] = frozenset()
    mapper: Mapper | None = None
    tables: WorkerTables = field(default_factory=WorkerTables)

    @property
    def consumer(self) -> str:
        return f"{self.engine_id}/{self.layout.worker}"

    @property
    def splits(self) -> frozenset[Split]:
        """Every way in which something is dealt out to the ranks, in any stage: all workers have to
        agree on who reads from whom."""
        return self.layout.splits() | self.other_splits

    def sources(self, tp_size: int, pp_size: int) -> Sources:
        """Raises UnsupportedError where a prefill engine of this size cannot be read from."""
        for split in self.splits:
            check_even(split, tp_size, "the prefill engine's ranks")
        found = sources(self.splits, self.layout.rank, tp_size)
        return over_stages(
            found, tp_size, num_stages=pp_size, num_reader_stages=self.layout.pp_size
        )


@dataclass(eq=False)
class Link(Counted):
    """A connection to a prefill worker that can be read from; made with one user.

    Attributes:
        mapped: reads it through a mapping, None where it has none; see ``reader_of``.
        tables: those of its tables that this worker has, too, by name.
        lease_seconds: how long it keeps blocks after the last sign of a reader, 0 where it takes no
            heartbeats.
        held: gives back what of NIXL's it uses, the last made first.
        num_users: who may still use it: its peer while it is its peer's link, and each read.
        closed: its engine does not answer, so that reads under way have no prospect.
        num_bytes: bytes of the reads under way that are not late.
        progressed: when a piece of a read last ended, in seconds of ``time.perf_counter``.
    """

    key: PeerKey
    incarnation: str
    agent_name: str
    plan: ReadPlan
    reader: Reader
    memory_type: str
    device_id: int
    tables: Mapping[str, RemoteTable] = field(default_factory=dict[str, RemoteTable])
    lease_seconds: float = 0.0
    mapped: MappedReader | None = None
    held: ExitStack = field(default_factory=ExitStack)
    retired: bool = False
    closed: bool = False
    num_bytes: int = 0
    num_bytes_done: int = 0
    progressed: float = field(default_factory=time.perf_counter)

    @property
    def pieces_per_row(self) -> int:
        return self.tables[STREAM_PIECES].num_records // self.tables[STREAM_HEADERS].num_records

    def serves(self, incarnation: str) -> bool:
        return incarnation in ("", self.incarnation)

    def reader_of(self, pairs: Pairs) -> Reader:
        if self.mapped is not None and self.mapped.suits(pairs):
            return self.mapped
        return self.reader

    def __post_init__(self) -> None:
        self._give_back = self.held.close


class Links:
    """Makes the connections to peers.  Owned by one thread."""

    def __init__(
        self, agent: NixlAgent, local: LocalWorker, on_removal: Callable[[], None]
    ) -> None:
        self._agent = agent
        self._local = local
        self._on_removal = on_removal
        self._all: list[Link] = []
        # a retired link whose reads go on, and the same peer connected again, share NIXL's agent.
        # Without users it is kept until it is forgotten: UCX does not close a connection to a
        # process that lives, and a new one would come on top of it, at both ends.
        self._agents: dict[str, RefCounted] = {}
        self._names: dict[PeerKey, str] = {}
        self._forgotten: set[str] = set()
        # Peers of one tensor-parallel size share this worker's side of their plans.
        self._local_lists: dict[bytes, RefCounted] = {}

    @property
    def num_retired(self) -> int:
        return len(self._existing()) - len(self.live())

    def _reach(self, key: PeerKey, described: WorkerDescription) -> RefCounted:
        """The name of a worker's agent, which its user has to drop; raises what NIXL does."""
        name = self._agent.add_peer(described.agent_metadata)
        if self._names.get(key) != name:
            self.forget(self._names.get(key, ""))  # of a start of the engine that is over
        self._names[key] = name
        known = self._agents.get(name)
        if known is None:
            kept = [one for one, agent in self._agents.items() if not agent.num_users]
            for one in kept[: 1 - MAX_KEPT]:
                self.forget(one)
            shared = self._agents[name] = RefCounted(name, lambda: self._leave_agent(name))
        else:
            shared = known.hold()
            self._forgotten.discard(name)
        try:
            self._agent.connect(name)
        except Exception:
            self.forget(name)
            shared.drop()
            raise
        return shared

    def connect(
        self, key: PeerKey, incarnation: str, described: WorkerDescription, plan: ReadPlan
    ) -> Link:
        """Connect to a worker that has described itself; raises what NIXL does."""
        with ExitStack() as held:
            name = self._hold(self._reach(key, described), held)
            reader = self._reader(name, described, plan, held)
            link = Link(
                key=key,
                incarnation=incarnation,
                agent_name=name,
                plan=plan,
                reader=reader,
                mapped=self._map(key, described, plan, held),
                memory_type=described.memory_type,
                device_id=described.device_id,
                tables=self._tables(name, described, held),
                lease_seconds=described.lease_seconds,
                held=held.pop_all(),
            )
        self._all = [*self._existing(), link]
        return link

    def retire(self, link: Link) -> None:
        if not link.retired:
            link.retired = True
            link.drop()

    def close(self, key: PeerKey, *, has_ended: bool) -> None:
        """The engine behind a key does not answer, or has ended: its reads have no prospect."""
        for link in self._existing():
            if link.key == key:
                link.closed = True
                self.retire(link)
        if has_ended:
            name = self._names.pop(key, "")
            if name not in self._names.values():  # it may live at another address
                self.forget(name)

    def forget(self, name: str) -> None:
        """NIXL's connection to the agent of this name is of no use any more, if there is one."""
        if name in self._agents:
            self._forgotten.add(name)
            if not self._agents[name].num_users:
                run_logged(lambda: self._leave_agent(name))

    def _existing(self) -> list[Link]:
        self._all = [link for link in self._all if link.num_users]
        return self._all

    def live(self) -> list[Link]:
        return [link for link in self._all if not link.retired]

    def _map(
        self, key: PeerKey, described: WorkerDescription, plan: ReadPlan, held: ExitStack
    ) -> MappedReader | None:
        mapper = self._local.mapper
        if mapper is None or not len(plan.remote_rows):
            return None
        try:
            mapped = mapper.open(described.mapped, plan)
        except Exception as error:  # noqa: BLE001 whatever it is, there is NIXL
            logger.info("prefill engine %s is read by NIXL and not mapped: %s", key, error)
            return None
        held.callback(run_logged, mapped.close)
        return mapped

    def _reader(
        self, name: str, described: WorkerDescription, plan: ReadPlan, held: ExitStack
    ) -> NixlReader:
        local = remote = None
        if len(plan.local_rows):
            local = self._hold(self._local_list(plan.local_rows), held)
        if len(plan.remote_rows):
            prepared = self._agent.prepare(name, plan.remote_rows, described.memory_type)
            remote = self._keep(prepared, held)
        return NixlReader(self._agent, local, remote)

    def _tables(
        self, name: str, described: WorkerDescription, held: ExitStack
    ) -> dict[str, RemoteTable]:
        found: dict[str, RemoteTable] = {}
        for kind, place in described.tables.items():
            own = self._local.tables.by_name.get(kind)
            if own is not None:
                found[kind] = own.of_peer(self._agent, name, place)
                self._keep(found[kind].prepared, held)
        return found

    def _local_list(self, rows: UInt64Array) -> RefCounted:
        key = rows.tobytes()
        known = self._local_lists.get(key)
        if known is not None:
            return known.hold()
        prepared = self._agent.prepare("", rows, self._local.memory_type)
        made = self._local_lists[key] = RefCounted(prepared, lambda: self._forget_local_list(key))
        return made

    def _keep(self, prepared: Any, held: ExitStack) -> Any:
        held.callback(run_logged, lambda: self._agent.release_list(prepared))
        return prepared

    @staticmethod
    def _hold(counted: RefCounted, held: ExitStack) -> Any:
        held.callback(counted.drop)
        return counted.value

    def _forget_local_list(self, key: bytes) -> None:
        self._agent.release_list(self._local_lists.pop(key).value)

    def _leave_agent(self, name: str) -> None:
        if name not in self._forgotten:
            return
        self._forgotten.remove(name)
        del self._agents[name]
        self._names = {key: one for key, one in self._names.items() if one != name}
        self._agent.remove_peer(name)
        self._on_removal()


def log_ready(link: Link, described: WorkerDescription, tolerated: str) -> None:
    lengths = link.plan.local_rows[:, 1]
    num_lanes = sum(section.num_lanes for section in link.plan.sections)
    least = lengths.min(initial=1 << 62) if len(lengths) else 0
    logger.info(
        "connected to prefill engine %s: %s, %d blocks, %d descriptors of %d to %d bytes for each "
        "run of tokens or state%s",
        *(link.key, describe_place(described.layout), described.layout.num_blocks),
        *(num_lanes, least, lengths.max(initial=0)),
        f"; tolerated differences: {tolerated}" if tolerated else "",
    )
