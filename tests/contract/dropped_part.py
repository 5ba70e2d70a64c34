"""A process that makes one part of an engine, has it at work, drops it in a reference cycle without
`shutdown()`, and ends; test_dropped_engine.py starts it.

    python tests/contract/dropped_part.py PART MODEL

Prints the seconds that the collection took.  What hangs is told with the stacks of all threads."""

import faulthandler
import gc
import socket
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_SECONDS = 120
HANG_SECONDS = 20
HOST = "127.0.0.1"
PROMPT = list(range(40))
KEY = "0123456789abcdef" * 2


def silent_port() -> int:
    """A port that takes connections and answers nothing, as long as this process is there."""
    listener = socket.create_server((HOST, 0))
    kept.append(listener)
    return listener.getsockname()[1]


kept: list[Any] = []


def prefill_engine(model: Path) -> Any:
    """vLLM's scheduler, whose connector keeps a prompt for others and serves its side channel."""
    from tests.contract.scheduled_core import TO_PREFILL, Core, request_of
    from tests.kit.descriptions import description
    from tests.kit.ports import free_port
    from vllm_commext.nixl.metadata import HandshakeMetadata

    core = Core(model, "kv_producer", side_channel_host=HOST, side_channel_port=free_port())
    connector: Any = core.scheduler.get_kv_connector()
    connector.set_xfer_handshake_metadata({0: HandshakeMetadata(description("e"))})
    core.add(request_of("p", PROMPT, {**TO_PREFILL, "stream_key": KEY}, max_tokens=1))
    core.run("p")
    port = connector._kv_transfer_config.kv_connector_extra_config["side_channel_port"]
    stranger = socket.create_connection((HOST, port))
    stranger.sendall(b"\xff")
    kept.append(stranger)
    return core


def decode_engine(model: Path) -> Any:
    """The same with a request that waits for a prefill engine that does not answer."""
    from tests.contract.scheduled_core import Core, request_of

    core = Core(model, "kv_consumer")
    place = {"remote_host": HOST, "remote_port": silent_port()}
    params = {"do_remote_prefill": True, "do_remote_decode": False, "stream_key": KEY, **place}
    core.add(request_of("d", PROMPT, params, max_tokens=2))
    for _ in range(3):
        core.turn()
    return core


def reusing_engine(model: Path) -> Any:
    """The same with a request that waits for what another engine has on offer."""
    from tests.contract.scheduled_core import Core, request_of
    from vllm_commext.nixl.wire.params import write_place

    core = Core(model, "kv_both", reuse_blocks=True)
    params = {"answer_token_ids": [1], "reuse_from": [write_place(HOST, silent_port())]}
    core.add(request_of("r", PROMPT, params, max_tokens=2))
    for _ in range(3):
        core.turn()
    return core


def worker(model: Path) -> Any:
    """A worker's agent and transfer thread, with a load from an engine that does not answer."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tests.contract.vllm_caches import make_caches
    from vllm_commext.nixl.config import ConnectorConfig
    from vllm_commext.nixl.geometry.plan import Blocks
    from vllm_commext.nixl.geometry.topology import Rank
    from vllm_commext.nixl.metadata import StepMetadata
    from vllm_commext.nixl.requests import Load, RemoteRequest
    from vllm_commext.nixl.vllm_cache import ModelFacts
    from vllm_commext.nixl.worker import WorkerSide

    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config, caches = make_caches({"layer": spec})
    facts = ModelFacts(Rank(1, 0), 1, None, True, {"layer": "FLASH_ATTN"})
    side = WorkerSide("d", ConnectorConfig(HOST, 5600), {}, config, facts)
    side.register(caches)
    remote = RemoteRequest("p", "i", HOST, silent_port(), 1, "r", ((1,),), num_tokens=16)
    load = Load("r", remote, num_tokens=16, blocks=(Blocks(0, (1,)),))
    side.start_step(StepMetadata(loads=[load]))
    time.sleep(0.2)
    side.take_outcomes()
    return side


def queue(model: Path) -> Any:
    """A writer with a message that nobody takes, and its reader."""
    from vllm_commext.shm.queue import MessageQueue

    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue(PROMPT, timeout=5)
    return [writer, reader]


ALL = (prefill_engine, decode_engine, reusing_engine, worker, queue)
PARTS: dict[str, Callable[[Path], Any]] = {part.__name__: part for part in ALL}


class Cycle:
    """Holds a part, and itself."""

    def __init__(self, part: Any) -> None:
        self.part, self.own = part, self


def main() -> None:
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    cycle = Cycle(PARTS[sys.argv[1]](Path(sys.argv[2])))
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    is_there = weakref.ref(cycle)
    del cycle
    start = time.monotonic()
    gc.collect()
    assert is_there() is None
    sys.stdout.write(f"\n{time.monotonic() - start}\n")


if __name__ == "__main__":
    main()
