"""Engines made of the real NIXL agent, transfer thread and side channel, on numpy memory.

Run as a program it is a prefill engine in a process of its own: it prints its worker's description
as one line (NIXL prints others), and goes on until its standard input ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_commext.nixl import wire
from vllm_commext.nixl.agent import NixlAgent
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.fence import NUM_SLOTS
from vllm_commext.nixl.io_thread import TransferThread
from vllm_commext.nixl.peers import LocalSide
from vllm_commext.nixl.recorder import TransferRecorder, empty_data, merge
from vllm_commext.nixl.regions import Region
from vllm_commext.nixl.requests import Load, Outcomes, RemoteRequest
from vllm_commext.nixl.side_channel import SideChannelServer
from vllm_commext.nixl.topology import RankShape
from vllm_commext.testing.servers import free_port

HOST = "127.0.0.1"
BOUND_SECONDS = 60.0
BLOCK_BYTES = 96
STRIDE_BYTES = 128
DESCRIPTION = "description: "
FACTS = {"model": "m", "block_size": "16"}

Bytes = npt.NDArray[np.uint8]


def random_bytes(num_bytes: int, seed: int) -> Bytes:
    """Bytes in which every block differs from every other."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def wait_until(look: Callable[[], bool], what: str) -> None:
    """Wait for a condition; the bound only catches hangs."""
    deadline = time.monotonic() + BOUND_SECONDS
    while not look():
        assert time.monotonic() < deadline, f"waited {BOUND_SECONDS:g} s for {what}"
        time.sleep(0.002)


class Engine:
    """One engine with one worker: ``memory`` is a row of bytes for each layer's cache."""

    def __init__(
        self,
        engine_id: str,
        *,
        seed: int = 0,
        num_layers: int = 3,
        num_blocks: int = 24,
        block_bytes: int = BLOCK_BYTES,
        stride_bytes: int = STRIDE_BYTES,
        facts: dict[str, str] | None = None,
        layer_names: Sequence[str] = (),
        tp_size: int = 1,
        serve: bool = False,
        port: int = 0,
        **settings: Any,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self.port = port or free_port()
        self.memory = [
            random_bytes(num_blocks * stride_bytes, 1000 * seed + layer)
            for layer in range(num_layers)
        ]
        names = layer_names or [f"layer{number}" for number in range(num_layers)]
        self.regions = tuple(
            Region(name, row.ctypes.data, stride_bytes, block_bytes, num_blocks)
            for name, row in zip(names, self.memory, strict=True)
        )
        config = ConnectorConfig(
            side_channel_host=HOST,
            side_channel_port=self.port,
            **{"num_threads": 1, "handshake_timeout": 20.0, **settings},
        )
        self.agent = NixlAgent(config)
        ranges = [(row.ctypes.data, row.nbytes) for row in self.memory]
        self.agent.register(ranges, self.regions, "DRAM", 0)
        shape = RankShape(tp_size, 0, 2)
        facts = FACTS if facts is None else facts
        self.description = wire.encode_description(self._describe(facts, tp_size))
        self.recorder = TransferRecorder()
        self.recorded = empty_data()
        self.outcomes = Outcomes()
        local = LocalSide(engine_id, shape, facts, self.regions)
        self.thread = TransferThread(self.agent, config, local, self.recorder)
        self.thread.start()
        self.server: SideChannelServer | None = None
        if serve:
            self.serve(self.description)

    def serve(self, description: bytes) -> None:
        """Answer on the side channel with this description."""
        self.server = SideChannelServer(
            self.engine_id, self.incarnation, HOST, self.port, {0: description}
        )

    def remote(self, request_id: str, block_ids: Sequence[int], **changes: Any) -> RemoteRequest:
        """A request that this engine has prefilled."""
        values: dict[str, Any] = {
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "host": HOST,
            "port": self.port,
            "tp_size": 1,
            "request_id": request_id,
            "block_ids": tuple(block_ids),
            "num_tokens": 16 * len(block_ids),
        }
        return RemoteRequest(**{**values, **changes})

    def collect(self) -> Outcomes:
        """Everything that has ended so far; what is reported twice is an error."""
        new = self.thread.take_outcomes()
        for name in ("sent", "received", "failed", "late", "settled"):
            seen, more = getattr(self.outcomes, name), getattr(new, name)
            assert not seen & more, f"{name} reported twice: {seen & more}"
            seen |= more
        merge(self.recorded, self.recorder.take() or {})
        return self.outcomes

    def load(self, *loads: Load) -> Outcomes:
        """Submit loads and wait until each is received."""
        for load in loads:
            self.thread.submit(load)
        return self.wait(lambda: {load.request_id for load in loads} <= self.collect().received)

    def wait(self, look: Callable[[], bool]) -> Outcomes:
        wait_until(look, f"outcomes of engine {self.engine_id}, so far {self.outcomes}")
        return self.outcomes

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
        self.thread.stop()

    def _describe(self, facts: dict[str, str], tp_size: int) -> wire.WorkerDescription:
        return wire.WorkerDescription(
            engine_id=self.engine_id,
            tp_rank=0,
            tp_size=tp_size,
            facts=facts,
            agent_name=self.agent.name,
            agent_metadata=self.agent.metadata(),
            memory_type="DRAM",
            device_id=0,
            num_blocks=self.regions[0].num_blocks,
            region_names=[region.name for region in self.regions],
            base_addresses=[region.base_address for region in self.regions],
            stride_bytes=[region.stride_bytes for region in self.regions],
            block_bytes=[region.block_bytes for region in self.regions],
            fence_address=self.agent.board.epochs.ctypes.data,
            num_fence_slots=NUM_SLOTS,
        )


def expected_after(
    before: Sequence[Bytes],
    source: Sequence[Bytes],
    pairs: Sequence[tuple[int, int]],
    *,
    block_bytes: int = BLOCK_BYTES,
    stride_bytes: int = STRIDE_BYTES,
) -> list[Bytes]:
    """The destination after a copy of (local, remote) blocks, byte by byte apart from NIXL."""
    after = [row.copy() for row in before]
    for row, source_row in zip(after, source, strict=True):
        for local, remote in pairs:
            for byte in range(block_bytes):
                row[local * stride_bytes + byte] = source_row[remote * stride_bytes + byte]
    return after


def same(found: Sequence[Bytes], expected: Sequence[Bytes]) -> bool:
    """Whether all bytes are equal."""
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


class PeerProcess:
    """A prefill worker in its own process, which can be stopped, continued and killed; its side
    channel is in this process, so that it answers all the while."""

    def __init__(self, engine_id: str, *, seed: int, num_blocks: int = 24, port: int = 0) -> None:
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self.port = port or free_port()
        self.memory = [random_bytes(num_blocks * STRIDE_BYTES, 1000 * seed + k) for k in range(3)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, engine_id, str(seed), str(num_blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith(DESCRIPTION))
        description = bytes.fromhex(line.removeprefix(DESCRIPTION))
        self.server = SideChannelServer(
            engine_id, self.incarnation, HOST, self.port, {0: description}
        )

    remote = Engine.remote

    def stop(self) -> None:
        """Stop the process; returns when each of its threads has stopped."""
        os.kill(self._process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        wait_until(
            lambda: all(_state(task / "stat") == "T" for task in tasks.iterdir()),
            "the peer's threads to stop",
        )

    def go_on(self) -> None:
        """Let a stopped process go on."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, and its side channel with it."""
        self.server.close()
        self._process.kill()
        self._process.communicate(timeout=BOUND_SECONDS)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.returncode is None:
            self.kill()


def _state(stat: Path) -> str:
    """State letter of a thread, which follows the name in brackets."""
    return stat.read_text().rpartition(")")[2].split()[0]


def main() -> None:
    engine_id, seed, num_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = Engine(engine_id, seed=seed, num_blocks=num_blocks)
    sys.stdout.write(f"{DESCRIPTION}{engine.description.hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
