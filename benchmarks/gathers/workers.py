"""Workers of the connector's, without engines: two that are read, the ranks of TP 2, and one that
reads."""

import importlib
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from gathers.shapes import SHAPES, Shape
from gathers.timeline import Timeline
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.gathered.staging import CudaCopies, Gathering
from vllm_commext.nixl.geometry.layout import CacheLayout
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.mapped.reader import Mapped
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.prefill.fence import first_nonces
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.requests import Hold, Load, RemoteRequest
from vllm_commext.nixl.tables import WorkerTables
from vllm_commext.nixl.transfer_thread import TransferThread
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire.description import WorkerDescription, encode_description

HOST, KEY = "127.0.0.1", bytes(32)
P_TP = 2
MAX_LOADS = 64
"""Of one way of reading one shape."""
MAX_SECONDS = 20.0
Settings = dict[str, Any]


class Worker:
    """A worker of the connector's on memory of one device.

    Args:
        device: where it is.
        memory: its cache.
        layout: what the cache looks like.
        settings: the connector's, and ``thread_blocks`` of the kernel that packs and unpacks.
    """

    def __init__(
        self,
        engine_id: str,
        device: torch.device,
        memory: torch.Tensor,
        layout: CacheLayout,
        settings: Settings,
    ) -> None:
        settings = dict(settings)
        kernel = {"num_blocks": blocks} if (blocks := settings.pop("thread_blocks", 0)) else {}
        self._config = config = ConnectorConfig(HOST, 1, stream_chunks=False, **settings)
        self._agent = NixlAgent(config)
        self._mapped = Mapped(config)
        tables = WorkerTables()
        tables.fences.arm(KEY)
        ranges = [(memory.data_ptr(), memory.nbytes)]
        is_on_gpu = device.type == "cuda"
        self._mapped.prepare(ranges, is_on_gpu=is_on_gpu)
        kind, index = ("VRAM", device.index or 0) if is_on_gpu else ("DRAM", 0)
        self._agent.register(ranges, kind, index)
        gathering: Gathering | None = None
        if config.gathered_reads:
            copies = CudaCopies(2 * config.gather_slots, **kernel) if is_on_gpu else None
            gathering = Gathering(config, device, copies)
            gathering.prepare(self._agent, ranges)
            tables.add(gathering.table)
        tables.register(self._agent)
        local = LocalWorker(
            engine_id,
            {},
            layout,
            memory_type=kind,
            device_id=index,
            mapper=self._mapped.mapper,
            tables=tables,
            gathering=gathering,
        )
        self.description = encode_description(
            WorkerDescription(
                engine_id=engine_id,
                facts={},
                agent_metadata=self._agent.metadata(),
                memory_type=kind,
                device_id=index,
                layout=layout,
                lease_seconds=config.kv_lease_duration,
                mapped=self._mapped.offer,
                staging=None if gathering is None else gathering.offer,
                **tables.described(),
            )
        )
        self.recorder = TransferRecorder()

        def select() -> None:
            if is_on_gpu:
                torch.accelerator.set_device_index(index)

        self.thread = TransferThread(self._agent, config, local, self.recorder, select)
        self.thread.start()

    def hold(self, shape: Shape, count: int) -> None:
        """Keep the blocks of so many loads, as after their prefills."""
        nonces = first_nonces(KEY)
        for number in range(count):
            blocks = shape.block_ids(number % shape.loads, 1)
            block_ids = tuple(block for group in blocks for block in group)
            nonce = int(nonces[number])
            self.thread.submit(Hold(f"x{number}", 600.0, number, nonce, block_ids=block_ids))

    def close(self) -> None:
        self.thread.stop()
        self._mapped.close()


def device_of(kind: str, number: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def memory_on(device: torch.device, shapes: Sequence[Shape], tp_size: int) -> torch.Tensor:
    num_bytes = max(shape.num_bytes(tp_size) for shape in shapes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def set_constants(texts: Sequence[str]) -> None:
    """Give constants of the package other values, each as ``module.NAME=number``."""
    for text in texts:
        name, _, value = text.partition("=")
        module, _, constant = name.rpartition(".")
        owner = importlib.import_module(f"vllm_commext.{module}")
        setattr(owner, constant, type(getattr(owner, constant))(value))


def serve(kind: str, gpu: int, tp_rank: int, constants: Sequence[str], pipe: Connection) -> None:
    """A prefill rank: for each shape and settings that it is told, a worker that holds prefills;
    told nothing, it says what it has packed since, and when; told None, it ends."""
    set_constants(constants)
    device, shapes = device_of(kind, gpu), SHAPES[kind]
    memory = memory_on(device, shapes, P_TP)
    torch.manual_seed(tp_rank)
    memory.random_(0, 256)
    if kind == "cuda":
        torch.cuda.synchronize()
    timeline = Timeline()
    timeline.watch_packing()
    worker: Worker | None = None
    while (told := pipe.recv()) is not None:
        if not told:
            pipe.send(timeline.take())
            continue
        if worker is not None:
            worker.close()
        shape, settings = shapes[told[0]], told[1]
        layout = shape.layout(memory.data_ptr(), P_TP, tp_rank)
        worker = Worker("p", device, memory, layout, settings)
        worker.hold(shape, MAX_LOADS)
        pipe.send(worker.description)
    os._exit(0)


class Decode:
    """The decode worker, and what it reads from: workers of these descriptions, by rank.

    Attributes: ``timeline``: of the last run.
    """

    def __init__(
        self,
        kind: str,
        shape: Shape,
        memory: torch.Tensor,
        settings: Settings,
        descriptions: dict[int, bytes],
        timeline: Timeline,
    ) -> None:
        self._shape = shape
        self._tp_size = len(descriptions)
        self.timeline = timeline
        # A port of the system's choice would have to be known before the server is there.
        self._port = 20000 + os.getpid() % 20000
        self._server = SideChannelServer("p", "one", HOST, self._port, descriptions)
        layout = shape.layout(memory.data_ptr(), 1, 0)
        self._worker = Worker("d", device_of(kind, 0), memory, layout, settings)
        self._has_news = threading.Event()
        self._worker.thread.outcomes.on_first = self._has_news.set
        self._nonces = first_nonces(KEY)
        self._number = 0

    def close(self) -> None:
        self._worker.close()
        self._server.close()

    def _load(self, load: int) -> Load:
        shape, number = self._shape, self._number
        self._number += 1
        num_tokens = shape.blocks * shape.block_tokens
        remote = RemoteRequest(
            engine_id="p",
            incarnation="one",
            host=HOST,
            port=self._port,
            tp_size=self._tp_size,
            request_id=f"x{number}",
            block_ids=tuple(map(tuple, shape.block_ids(load, 1))),
            num_tokens=num_tokens,
            fence_slot=number,
            fence_nonce=int(self._nonces[number]),
        )
        blocks = tuple(Blocks(0, ids) for ids in shape.block_ids(load, 2))
        return Load(f"r{number}", remote, blocks, num_tokens)

    def run(self) -> tuple[float, dict[str, Any]]:
        """Seconds from the first load to the end of the last, and what was counted."""
        while self._number % self._shape.loads:  # which of the blocks are held
            self._number += 1
        loads = [self._load(number) for number in range(self._shape.loads)]
        missing = {load.request_id for load in loads}
        self.timeline.take()
        started = time.monotonic()
        for load in loads:
            self._worker.thread.submit(load)
        while missing:
            assert self._has_news.wait(MAX_SECONDS), "a load does not end"
            self._has_news.clear()
            outcomes = self._worker.thread.outcomes.take()
            assert not outcomes.failed, f"loads failed: {outcomes.failed}"
            missing -= outcomes.received
        ended = time.monotonic()
        self.timeline.note(started, 0, "begun")
        return ended - started, self._worker.recorder.take() or {}
