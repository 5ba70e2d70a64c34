"""The prefill side of a read, in a process of its own."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kv_connector.samples import SPAWN
from tests.kit.servers import LOOPBACK, free_port
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.geometry.layout import CacheLayout
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.transfer_thread import TransferThread
from vllm_commext.nixl.transport.agent import NixlAgent, load_nixl
from vllm_commext.nixl.wire.description import WorkerDescription, encode_description

PREFILL = "prefill"
FACTS = {"model": "a tiny one"}
READY_SECONDS = 120.0


@dataclass(frozen=True)
class Source:
    """What a reader must know.

    Attributes:
        port: of the side channel; ours only.
        incarnation: the same.
        metadata: of the NIXL agent; vLLM's only.
        address: of the memory.
    """

    port: int = 0
    incarnation: str = ""
    metadata: bytes = b""
    address: int = 0

    def request(
        self, request_id: str, block_ids: Sequence[int], num_tokens: int, fence_slot: int = 0
    ) -> RemoteRequest:
        """What our reader is given of a request whose blocks are here; fence_slot -1 for none."""
        return RemoteRequest(
            engine_id=PREFILL,
            incarnation=self.incarnation,
            host=LOOPBACK,
            port=self.port,
            tp_size=1,
            request_id=f"prefill-{request_id}",
            block_ids=(tuple(block_ids),),
            num_tokens=num_tokens,
            fence_slot=fence_slot,
        )


@contextlib.contextmanager
def running(serve: Callable[..., Any], *arguments: Any) -> Iterator[Source]:
    """A prefill side; ended with the block."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(there, *arguments))
    process.start()
    try:
        if not here.poll(READY_SECONDS):
            raise TimeoutError(f"the prefill side is not ready within {READY_SECONDS:g} s")
        yield here.recv()
    finally:
        process.kill()
        process.join(10)


def numbered_blocks(num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint64]:
    """``[num_blocks, block_bytes // 8]``: each block full of its own number."""
    numbers = np.arange(num_blocks, dtype=np.uint64)
    return np.repeat(numbers[:, None], block_bytes // 8, axis=1)


def config(port: int) -> ConnectorConfig:
    return ConnectorConfig(side_channel_host=LOOPBACK, side_channel_port=port)


def serve_ours(there: Connection, num_blocks: int, block_bytes: int, layout: bytes) -> None:
    """Our prefill worker, with the reader's layout at another address."""
    memory = numbered_blocks(num_blocks, block_bytes)
    port, incarnation = free_port(), uuid.uuid4().hex
    agent = NixlAgent(config(port))
    agent.register([(memory.ctypes.data, memory.nbytes)], "DRAM", 0)
    moved = _moved(msgspec.msgpack.decode(layout, type=CacheLayout), memory.ctypes.data)
    local = LocalWorker(PREFILL, FACTS, moved)
    local.tables.register(agent)
    description = encode_description(_describe(agent, local))
    thread = TransferThread(agent, config(port), local, TransferRecorder())
    thread.start()
    server = SideChannelServer(PREFILL, incarnation, LOOPBACK, port, {0: description})
    there.send(Source(port=port, incarnation=incarnation))
    there.poll(None)
    server.close()


def _moved(layout: CacheLayout, address: int) -> CacheLayout:
    """A layout of one region, at another address."""
    (family,) = layout.families
    family = msgspec.structs.replace(family, base_addresses=[address])
    return msgspec.structs.replace(layout, families=[family])


def _describe(agent: NixlAgent, local: LocalWorker) -> WorkerDescription:
    return WorkerDescription(
        engine_id=local.engine_id,
        facts=local.facts,
        agent_metadata=agent.metadata(),
        memory_type="DRAM",
        device_id=0,
        layout=local.layout,
        tables=local.tables.places,
    )


def serve_vllm(there: Connection, num_blocks: int, block_bytes: int) -> None:
    """An agent as vLLM's prefill worker makes it."""
    memory, api = numbered_blocks(num_blocks, block_bytes), load_nixl()
    settings = api.nixl_agent_config(num_threads=4, capture_telemetry=True)
    agent = api.nixl_agent(str(uuid.uuid4()), settings)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    metadata = agent.get_agent_metadata()
    there.send(Source(metadata=metadata, address=memory.ctypes.data))
    there.poll(None)
