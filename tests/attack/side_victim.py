"""A prefill worker's parts that strangers reach, as a process: a real side channel, a real NIXL
agent that takes notifications, and the wakeup socket."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from tests.attack.judge import soft_limit
from tests.kit.descriptions import description
from tests.kit.inquiry import ask
from tests.kit.ports import LOOPBACK, free_port
from tests.unit.nixl.test_reuse_table import BLOCK, Engine
from tests.unit.nixl.test_wire_description import ATTENTION, LAYOUT
from vllm_commext.errors import CommextError
from vllm_commext.nixl.geometry.layout import CacheLayout, Family, Group
from vllm_commext.nixl.geometry.plan import plan_read
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.reuse import Names, Offers, OfferTable
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import (
    WorkerDescription,
    describe,
    encode_description,
    open_description,
)

ENGINE = "prefill-0"
_READY = "wakeup"
BOUND_SECONDS = 30.0
SECRET = b"a secret of sixteen bytes and more"
PADDING = {"padding": "x" * 200_000}
"""Makes a description as long as that of a large model."""


@dataclass
class SideVictim:
    """The process, and what its attackers and its honest askers know."""

    pid: int
    thread: int
    port: int
    secret: bytes | None
    wakeup: str

    @property
    def pids(self) -> Sequence[int]:
        return [self.pid]

    @property
    def serving(self) -> Sequence[int]:
        """The thread that answers, by its own number, and the one it shares its interpreter's lock
        with: that one may hold the lock while the machine gives it no core."""
        return [self.thread, self.pid]

    def ask(self) -> WorkerDescription:
        """A handshake on a connection of its own."""
        request = wire.DescribeRequest(engine_id=ENGINE, tp_rank=0)
        return open_description(ask(LOOPBACK, self.port, request, self.secret))

    def honest(self) -> None:
        described = self.ask()
        if described.engine_id != ENGINE:
            raise ValueError(f"expected engine {ENGINE!r}, got {described.engine_id!r}")

    def held(self) -> Mapping[str, float]:
        """Descriptors; UCX keeps some of peers that have gone."""
        return {"descriptors": float(max(len(os.listdir(f"/proc/{self.pid}/fd")) - 32, 0))}


class StepVictim(SideVictim):
    """Its engine's steps, which put blocks on offer and plan reads, are others'."""

    @property
    def serving(self) -> Sequence[int]:
        return [self.pid, self.thread]

    def honest(self, told: bytes = b"") -> None:
        """A step, where something is *told* beside many requests, and with a peer's description."""
        with Client(f"\0commext-attack-{self.port}") as engine:
            engine.send_bytes(told)
            engine.recv_bytes()


def layout_of(row_tokens: int) -> CacheLayout:
    """A thousand layers in blocks of so many tokens."""
    strides = {"head_stride": 16 * row_tokens, "row_stride": 32 * row_tokens}
    geometry = replace(ATTENTION, row_tokens=row_tokens, **strides)
    family = Family(0, [f"{layer}" for layer in range(1000)], [4096] * 1000, geometry)
    return replace(LAYOUT, groups=[Group("full", 2 * row_tokens)], families=[family])


@contextmanager
def side_channel(
    folder: Path, secret: bytes | None = None, kind: type[SideVictim] = SideVictim
) -> Iterator[SideVictim]:
    """The process at the usual soft limit of descriptors."""
    port = free_port()
    words = [sys.executable, "-m", __name__, str(port), (secret or b"").decode(), kind.__name__]
    with (folder / "side_channel.log").open("w") as log, soft_limit():
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        # NIXL writes there, too.
        ready = next((line for line in process.stdout if line.startswith(_READY)), "")
        if not ready:
            raise RuntimeError(f"the victim did not start: see {folder}")
        thread, wakeup = ready.removeprefix(_READY).split()
        yield kind(process.pid, int(thread), port, secret, wakeup)
        if process.poll() is not None:
            raise RuntimeError(f"the victim has ended with {process.returncode}: see {folder}")
    finally:
        process.kill()
        process.wait()


def _take_steps(listener: Listener, table: OfferTable) -> None:
    engine, own, running = Engine(), layout_of(8), []
    for number in range(256):
        engine.add(f"{number}", [number] * 4000, 1100)
    Names.root_of = lambda self, request: request.request_id.encode()
    offers = Offers(Names(str, BLOCK, Identity()), table, engine)
    while True:
        with listener.accept() as one:
            if told := one.recv_bytes():
                running = engine.requests
                with suppress(CommextError):
                    layout = open_description(describe(told, "start-1")).layout
                    plan_read(own, layout, local_device=0, remote_device=0)
            offers.add_running(running, engine.blocks_of)
            one.send_bytes(b"taken")


def _serve(port: int, secret: bytes | None, kind: str) -> None:
    from vllm.utils.gc_utils import freeze_gc_heap

    from vllm_commext.nixl.config import ConnectorConfig
    from vllm_commext.nixl.prefill.leases import LeaseManager
    from vllm_commext.nixl.prefill.side_channel import SideChannelServer
    from vllm_commext.nixl.recorder import TransferRecorder
    from vllm_commext.nixl.requests import CompletionQueue
    from vllm_commext.nixl.stream.producer import StreamDirectory
    from vllm_commext.nixl.stream.progress import WorkerTables
    from vllm_commext.nixl.transport.agent import NixlAgent
    from vllm_commext.nixl.wakeup import WakeupSocket

    config = ConnectorConfig(
        side_channel_host=LOOPBACK, side_channel_port=port, backend_params={"num_threads": "1"}
    )
    agent, recorder = NixlAgent(config), TransferRecorder()
    manager = LeaseManager(agent, WorkerTables(), config, recorder, CompletionQueue())
    short = open_description(describe(description(ENGINE, agent.metadata()), "start-1"))
    described = encode_description(replace(short, facts=PADDING))
    server = SideChannelServer(
        *(ENGINE, "start-1", LOOPBACK, port, {0: described}),
        *(secret, lambda: False, StreamDirectory()),
        blocks=(table := OfferTable([np.zeros(256 * 1100, dtype=np.uint64)])),
    )
    freeze_gc_heap()  # as vLLM's engine does at the end of its start
    wakeup, listener = WakeupSocket(num_workers=2), Listener(f"\0commext-attack-{port}")
    sys.stdout.write(f"{_READY} {server._thread.native_id} {wakeup.address}\n")
    sys.stdout.flush()
    if kind == StepVictim.__name__:
        _take_steps(listener, table)
    while server.num_refused >= 0:
        manager.take_notifications()
        manager.end_leases()
        recorder.take()
        time.sleep(0.001)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2].encode() or None, sys.argv[3])
