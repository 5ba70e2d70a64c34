"""Agents on two GPUs in two processes, and how long a read or a plain copy between them takes.

The peer's memory belongs to another process, as that of a prefill engine does.
"""

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from vllm_commext.gpu import ipc
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.transport.agent import DONE, IN_PROGRESS, NixlAgent

NUM_BYTES = 1 << 31
MAX_SECONDS = 20.0


def agent_on(device: int, params: dict[str, str]) -> tuple[NixlAgent, torch.Tensor]:
    """An agent with two gibibytes of one GPU registered."""
    torch.cuda.set_device(device)
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize()
    agent = NixlAgent(ConnectorConfig("127.0.0.1", 1, backend_params=params))
    agent.register([(memory.data_ptr(), memory.nbytes)], "VRAM", device)
    return agent, memory


def serve(device: int, params: dict[str, str], pipe: Connection) -> None:
    """The peer: its memory is read."""
    agent, memory = agent_on(device, params)
    address = memory.data_ptr()
    pipe.send((agent.metadata(), address, ipc.export_handle(address)))
    pipe.recv()
    os._exit(0)


def read_once(agent: NixlAgent, lists: tuple[Any, Any], indices: Any) -> tuple[float, float]:
    """Seconds to make and post a read, and until it has ended."""
    started = time.perf_counter()
    read = agent.make_read(lists[0], indices[0], lists[1], indices[1])
    state = agent.post(read)
    posted = time.perf_counter()
    while state == IN_PROGRESS and time.perf_counter() - started < MAX_SECONDS:
        state = agent.state(read)
    ended = time.perf_counter()
    assert state == DONE, state
    agent.release_read(read)
    return posted - started, ended - started


def copy_once(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of a plain copy between two GPUs of this process."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - started
