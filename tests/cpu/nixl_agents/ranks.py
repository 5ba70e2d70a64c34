"""Prefill workers in processes of their own, and engines of several ranks."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.nixl_agents.harness import (
    ALONE,
    BOUND_SECONDS,
    DESCRIPTION,
    GAP_BYTES,
    HEAD_BYTES,
    HOST,
    NUM_HEADS,
    Bytes,
    Engine,
    memory_of,
    wait_until,
)
from tests.kit import forked
from tests.kit.processes import stat_of
from tests.kit.servers import free_port
from vllm_commext.nixl.geometry.topology import Rank, Split, interval
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.requests import Hold, RemoteRequest

PROGRAM = Path(__file__).with_name("prefill_process.py")
MODULES = ("torch", "numpy", "msgspec", "zmq")
"""What takes longest of its imports: peers are forked from a process that has them."""
MODEL_HEADS = 4


class PeerProcess:
    """A prefill worker in its own process, which can be stopped, continued and killed; its side
    channel, where it ``serves`` one, is in this process, so that it answers all the while, or with
    ``whole`` in its own, so that it ends with it.  Of a prompt, ``num_computed`` blocks are
    computed.  It ``reads`` a remote request first."""

    def __init__(
        self,
        engine_id: str,
        *,
        seed: int,
        num_blocks: int = 24,
        rank: Rank = ALONE,
        num_heads: int = NUM_HEADS,
        port: int = 0,
        serve: bool = True,
        whole: bool = False,
        num_computed: int = 0,
        reads: RemoteRequest | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self.port = port or free_port()
        self.rank = rank
        stride_bytes = num_heads // rank.size * HEAD_BYTES + GAP_BYTES
        self.memory = memory_of(seed, 3, num_blocks, stride_bytes)
        numbers = (seed, num_blocks, num_heads, rank.size, rank.index, self.port if whole else 0)
        numbers += (num_computed,)
        wanted = json.dumps(asdict(reads)) if reads else ""
        arguments = [engine_id, self.incarnation, wanted, *map(str, numbers)]
        program = {"code": PROGRAM.read_text(), "arguments": arguments}
        reader, writer = os.pipe()
        with os.fdopen(reader) as output:
            self._process = forked.start(program, os.environ, MODULES, (writer, 2))
            os.close(writer)
            line = next(line for line in output if line.startswith(DESCRIPTION))
        pid, description = line.removeprefix(DESCRIPTION).split()
        self._pid = int(pid)
        self.description = bytes.fromhex(description)
        self.server: SideChannelServer | None = None
        if serve and not whole:
            self.serve(self.description)

    remote = Engine.remote
    serve = Engine.serve

    def stop(self) -> None:
        """Stop the process; returns when each of its threads has stopped."""
        os.kill(self._pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._pid}/task")
        wait_until(
            lambda: all(stat_of(task)[0] == "T" for task in tasks.iterdir()),
            "the peer's threads to stop",
        )

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, and its side channel with it."""
        if self.server is not None:
            self.server.close()
        os.kill(self._pid, signal.SIGKILL)
        self._process.wait(BOUND_SECONDS)
        self._process.stdin.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()


class Ranks:
    """A prefill engine of several ranks, of which each holds a part of the heads, behind one side
    channel. Those ``apart`` run in processes of their own; ``facts_of`` are single ranks'
    configuration facts, ``settings`` those of the engines in this process."""

    def __init__(
        self,
        engine_id: str,
        size: int,
        *,
        seed: int = 1,
        apart: Sequence[int] = (),
        facts_of: dict[int, dict[str, str]] | None = None,
        serve: bool = True,
        **settings: Any,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self.port = free_port()
        self.rank = Rank(size, 0)
        self.workers: list[Any] = []
        for index in range(size):
            common: dict[str, Any] = {
                "seed": 10 * seed + index,
                "rank": Rank(size, index),
                "num_heads": MODEL_HEADS,
            }
            if index in apart:
                self.workers.append(PeerProcess(engine_id, serve=False, **common))
            else:
                facts = (facts_of or {}).get(index)
                self.workers.append(Engine(engine_id, facts=facts, **common, **settings))
        self.server: SideChannelServer | None = None
        if serve:
            self.serve(range(size))

    remote = Engine.remote

    def serve(self, indices: Iterable[int]) -> None:
        """Answer on the side channel for these ranks."""
        descriptions = {index: self.workers[index].description for index in indices}
        self.server = SideChannelServer(
            self.engine_id, self.incarnation, HOST, self.port, descriptions
        )

    def hold(self, request_id: str, *, seconds: float = 600.0, slot: int = -1) -> None:
        """Every rank in this process keeps a finished prefill."""
        for worker in self.workers:
            if isinstance(worker, Engine):
                worker.thread.submit(Hold(request_id, seconds, slot))

    def wait_sent(self, request_id: str, indices: Iterable[int]) -> None:
        """Wait until these ranks report that the request's blocks may be freed."""
        for index in indices:
            worker = self.workers[index]
            worker.wait(lambda worker=worker: request_id in worker.collect().sent)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.close()
        for worker in self.workers:
            worker.__exit__()


def expected_heads(decode: Engine, prefill: Ranks, pairs: Sequence[tuple[int, int]]) -> list[Bytes]:
    """A decode rank's memory after a copy of (local, remote) blocks, head by head from the rank
    that holds it."""
    after = [row.copy() for row in decode.memory]
    split = Split(MODEL_HEADS)
    own = interval(split, decode.rank)
    for worker in prefill.workers:
        theirs = interval(split, worker.rank)
        for head in range(max(own[0], theirs[0]), min(own[1], theirs[1])):
            for row, source in zip(after, worker.memory, strict=True):
                for local, remote in pairs:
                    to = local * stride_of(decode.rank) + (head - own[0]) * HEAD_BYTES
                    start = remote * stride_of(worker.rank) + (head - theirs[0]) * HEAD_BYTES
                    row[to : to + HEAD_BYTES] = source[start : start + HEAD_BYTES]
    return after


def stride_of(rank: Rank) -> int:
    """Bytes between the blocks of a rank of the model."""
    return MODEL_HEADS // rank.size * HEAD_BYTES + GAP_BYTES


def untouched_but(decode: Engine, before: Sequence[Bytes], blocks: Iterable[int]) -> bool:
    """Whether nothing outside of these blocks' heads has changed."""
    stride = stride_of(decode.rank)
    masks = np.ones(len(before[0]), dtype=bool)
    for block in blocks:
        masks[block * stride : (block + 1) * stride - GAP_BYTES] = False
    return all(
        np.array_equal(row[masks], old[masks])
        for row, old in zip(decode.memory, before, strict=True)
    )
