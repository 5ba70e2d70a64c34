"""Engines of any tensor-parallel sizes and pipeline stages in this process, with real NIXL agents,
transfer threads and a side channel, on memory that the planner's reference fills."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.cpu.nixl_agents import harness
from tests.cpu.nixl_agents.harness import HOST, config_of, wait_until
from tests.kit.servers import free_port
from tests.unit.nixl.cluster_cases import Case, Request
from tests.unit.nixl.reference_cache import Cache
from tests.unit.nixl.reference_layout import describe
from tests.unit.nixl.reference_meaning import Int64Array, as_bytes, differences
from tests.unit.nixl.reference_stages import Stages, described, names_of, stage_of
from vllm_commext.nixl.geometry.layout import FULL
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.requests import Chunk, Hold, Listed, Load, RemoteRequest
from vllm_commext.nixl.stream.progress import ProgressTable, regions_of

LEASE_SECONDS = 600.0
NO_STAGES: Stages = []
PREEMPTION = 1000
"""Between two nonces of one request."""


class Worker(harness.Worker):
    """One rank of one stage, on one row of memory."""

    def __init__(
        self,
        engine_id: str,
        cache: Cache,
        rank: int,
        tags: Int64Array,
        port: int,
        *,
        stream_tokens: int = 0,
        stage: int = 0,
        dealt: Stages,
    ) -> None:
        row = as_bytes(tags)
        layout = describe(cache, rank, row.ctypes.data)
        splits = layout.splits()
        if len(dealt) > 1:
            layout = described(cache, dealt, stage, rank, row.ctypes.data)
        self.regions = regions_of(layout.groups, stream_tokens)
        num_pieces = sum(region.num_pieces for region in self.regions)
        progress = ProgressTable(num_pieces) if stream_tokens else None
        config = config_of(port)
        super().__init__(engine_id, [row], layout, config, progress=progress, other_splits=splits)


class _Side:
    """One of a case's two engines."""

    side = ""

    def __init__(
        self, case: Case, engine_id: str, *, streams: bool = False, dealt: Stages = NO_STAGES
    ) -> None:
        self.case = case
        self.cache: Cache = getattr(case, self.side)
        self.dealt = dealt or [names_of(self.cache)]
        self.engine_id = engine_id
        self.port = free_port()
        self.workers = [
            Worker(
                engine_id,
                self.cache,
                rank,
                self.memory_of(stage, rank),
                self.port,
                stream_tokens=max(one.num_remote_tokens for one in case.requests) * streams,
                stage=stage,
                dealt=self.dealt,
            )
            for stage, rank in self.places
        ]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Stage and rank of each of its workers, by their numbers."""
        ranks = range(self.cache.engine.tp_size)
        return [(stage, rank) for stage in range(len(self.dealt)) for rank in ranks]

    def case_of(self, stage: int) -> Case:
        """What a worker of a stage has computed, or is to read."""
        return replace(self.case, **{self.side: stage_of(self.cache, self.dealt[stage])})

    def memory_of(self, stage: int, rank: int) -> Int64Array:
        """Tags of a worker at the start."""
        return getattr(self.case_of(stage), f"{self.side}_memory")(rank)

    def close(self) -> None:
        for worker in self.workers:
            worker.thread.stop()


class Prefill(_Side):
    """A prefill engine that has computed a case's requests and holds them."""

    side = "prefill"

    def __init__(self, case: Case, engine_id: str, **how: Any) -> None:
        super().__init__(case, engine_id, **how)
        self.incarnation = uuid.uuid4().hex
        self._nonces = {one.number: one.number for one in case.requests}
        descriptions = dict(enumerate(worker.description for worker in self.workers))
        self.server = SideChannelServer(engine_id, self.incarnation, HOST, self.port, descriptions)

    def hold(self, request: Request, *, is_streamed: bool = False) -> None:
        """Keep the request's blocks; its number is its fence's slot."""
        number = request.number
        for worker in self.workers:
            hold = Hold(f"p{number}", LEASE_SECONDS, number, 0)
            if is_streamed:
                assert worker.publisher is not None
                hold = replace(hold, fence_nonce=self._nonces[number], stream_row=number)
                worker.publisher.ended([replace(hold, listed=self._rest(worker, request))])
            worker.thread.submit(hold)

    @staticmethod
    def _rest(worker: Worker, request: Request) -> Listed:
        """What is known at the end alone, for a row."""
        return tuple(
            (region.place, (len(table.block_ids), *table.block_ids))
            for group, region, table in zip(
                worker.layout.groups, worker.regions, request.remote, strict=True
            )
            if group.kind != FULL
        )

    def remote(self, request: Request, **changes: Any) -> RemoteRequest:
        values: dict[str, Any] = {
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "host": HOST,
            "port": self.port,
            "tp_size": self.case.prefill.engine.tp_size,
            "pp_size": len(self.dealt),
            "request_id": f"p{request.number}",
            "block_ids": tuple(table.block_ids for table in request.remote),
            "num_tokens": request.num_remote_tokens,
            "fence_slot": request.number,
        }
        return RemoteRequest(**{**values, **changes})

    def begin(self, request: Request) -> None:
        """The request gets its row, whose number is the request's; nothing is computed yet."""
        for worker in self.workers:
            worker.tables.fences.nonces[request.number] = request.number
            self._tell(worker, Chunk(request.number, request.number, (), 0, begins=True))

    def preempt(self, request: Request) -> None:
        """The request's blocks have gone to others: its fence is replaced."""
        number = request.number
        self._nonces[number] += PREEMPTION
        for worker in self.workers:
            assert worker.tables.progress is not None
            worker.tables.fences.nonces[number] = self._nonces[number]
            worker.tables.progress.restart(number, self._nonces[number])

    def abort(self, request: Request) -> None:
        """Nothing is handed over: readers are told, then its blocks are free."""
        number, nonce = request.number, self._nonces[request.number]
        for worker in self.workers:
            worker.thread.submit(Hold(f"p{number}", 0.0, number, nonce, number))

    def compute(self, request: Request, done: int, end: int) -> None:
        """A step computes the tokens ``[done, end)``."""
        for worker in self.workers:
            listed: list[tuple[int, tuple[int, ...]]] = []
            for group, region, table in zip(
                worker.layout.groups, worker.regions, request.remote, strict=True
            ):
                first, stop = (-(-tokens // group.block_size) for tokens in (done, end))
                if group.kind == FULL:
                    listed.append((region.place + first, table.block_ids[first:stop]))
            nonce = self._nonces[request.number]
            self._tell(worker, Chunk(request.number, nonce, tuple(listed), end))

    @staticmethod
    def _tell(worker: Worker, chunk: Chunk) -> None:
        worker.publisher.launched([chunk])

    def stream(self, request: Request) -> RemoteRequest:
        """Where the request is read while it is computed."""
        number = request.number
        told = {"fence_nonce": number, "stream_row": number, "stream_tag": number}
        regions = tuple(region.first for region in self.workers[0].regions)
        return self.remote(request, block_ids=(), stream_regions=regions, **told)

    def is_untouched(self) -> bool:
        """Whether every worker's memory is as it was."""
        return all(
            np.array_equal(worker.memory[0], as_bytes(self.memory_of(*place)))
            for place, worker in zip(self.places, self.workers, strict=True)
        )

    def wait_released(self, requests: Iterable[Request]) -> None:
        """Until every worker may free the blocks of these requests, and of no others."""
        names = {f"p{request.number}" for request in requests}
        for number, worker in enumerate(self.workers):
            wait_until(
                lambda worker=worker: worker.collect().sent >= names,
                f"the releases of prefill worker {number}",
            )
            assert worker.outcomes.sent == names
            assert worker.recorded["expired_requests"] == 0

    def close(self) -> None:
        self.server.close()
        super().close()


class Decode(_Side):
    """A decode engine that has nothing yet."""

    side = "decode"

    def submit(self, request: Request, remote: RemoteRequest) -> None:
        """Load a request on every worker."""
        blocks = tuple(Blocks(table.first, list(table.block_ids)) for table in request.local)
        name = f"d{request.number}"
        for worker in self.workers:
            worker.thread.submit(Load(name, remote, blocks, request.num_tokens))

    def wait_received(self, requests: Iterable[Request]) -> list[set[str]]:
        """Until these requests' loads have ended; those that failed, a worker at a time."""
        names = {f"d{request.number}" for request in requests}
        for number, worker in enumerate(self.workers):
            wait_until(
                lambda worker=worker: worker.collect().received >= names,
                f"the loads of decode worker {number}",
            )
            assert worker.outcomes.received == names
        return [worker.outcomes.failed for worker in self.workers]

    def faults(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong in the workers' memory after exactly these requests were loaded."""
        loaded = list(requests)
        found: list[str] = []
        for number, (stage, rank) in enumerate(self.places):
            worker, case = self.workers[number], self.case_of(stage)
            right = self.memory_of(stage, rank)
            allowed = [np.empty(0, dtype=np.int64)]
            least = 0
            for request in loaded:
                wanted = case.wanted(rank, request)
                right[wanted.offsets] = wanted.tags
                allowed.append(case.allowed(request))
                least += len(wanted.offsets)
            wrong = differences(right, worker.memory[0], np.concatenate(allowed))
            if len(wrong):
                found.append(f"decode worker {number}: {len(wrong)} bytes wrong, first {wrong[0]}")
            num_bytes = worker.recorded["bytes"]
            if not least <= num_bytes <= least + sum(map(len, allowed)):
                found.append(f"decode worker {number}: read {num_bytes} bytes, expected {least}")
        return found


class Cluster:
    """The engines of a case; ``others`` have prefill engines of other sizes and the same
    requests. ``theirs`` and ``ours`` are the pipeline stages of prefill and decode engines."""

    def __init__(
        self,
        case: Case,
        *others: Case,
        streams: bool = False,
        theirs: Stages = NO_STAGES,
        ours: Stages = NO_STAGES,
    ) -> None:
        self.requests = case.requests
        self.decode = Decode(case, "d", streams=streams, dealt=ours)
        self.prefills = [
            Prefill(one, f"p{number}", streams=streams, dealt=theirs)
            for number, one in enumerate((case, *others))
        ]

    @property
    def prefill(self) -> Prefill:
        return self.prefills[0]

    def run(self) -> None:
        """Hold all requests and load each from one prefill engine, turn about; wait until all
        sides are done."""
        shares = [
            (prefill, self.requests[number :: len(self.prefills)])
            for number, prefill in enumerate(self.prefills)
        ]
        for prefill, requests in shares:
            for request in requests:
                prefill.hold(request)
                self.decode.submit(request, prefill.remote(request))
        failed = self.decode.wait_received(self.requests)
        assert failed == [set() for _ in failed]
        for prefill, requests in shares:
            prefill.wait_released(requests)

    def stream(self, dice: random.Random) -> None:
        """Compute every request chunk by chunk while it is loaded; its end is told at the end."""
        for request in self.requests:
            self.prefill.begin(request)
            self.decode.submit(request, self.prefill.stream(request))
        for request in self.requests:
            done = 0
            while done < request.num_remote_tokens:
                end = min(done + dice.choice([3, 8, 12]), request.num_remote_tokens)
                self.prefill.compute(request, done, end)
                done = end
                time.sleep(0.02)
            self.prefill.hold(request, is_streamed=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in (self.decode, *self.prefills):
            engine.close()
