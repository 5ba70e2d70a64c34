"""vLLM's own NIXL worker, built without a model: the class that the installed version runs."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig

from kv_connector.shapes import CACHE_LAYOUT, Shape
from tests.kit.servers import LOOPBACK, free_port

DECODE = "decode"
PORT = 1


@functools.cache
def engine_config(model: Path) -> Any:
    """A model's configuration as a server makes it, and a world of one rank."""
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu"
    )
    config = EngineArgs(
        model=str(model), enforce_eager=True, dtype="float32", kv_transfer_config=transfer
    ).create_engine_config()
    config.cache_config.kv_cache_layout = CACHE_LAYOUT
    with set_current_vllm_config(config):
        address = f"tcp://{LOOPBACK}:{free_port()}"
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1, 1)
    return config


def make_worker(
    model: Path, caches: Mapping[str, torch.Tensor], cache_config: KVCacheConfig
) -> Any:
    """vLLM's worker with these tensors registered.

    On CPUs its constructor confines the thread that calls it to one core; that is taken back, for
    the other variant runs in the same thread.
    """
    config, cores = engine_config(model), os.sched_getaffinity(0)
    with set_current_vllm_config(config):
        worker = NixlPullConnectorWorker(config, DECODE, cache_config)
        os.sched_setaffinity(0, cores)
        worker.register_kv_caches(dict(caches))
    return worker


def close_worker(worker: Any) -> None:
    """Give back what it holds, its agent with its threads included."""
    worker.shutdown()
    del worker.nixl_wrapper


def own_metadata(worker: Any) -> NixlAgentMetadata:
    """What the worker tells its peers."""
    encoded = worker.xfer_handshake_metadata.agent_metadata_bytes
    return msgspec.msgpack.decode(encoded, type=NixlAgentMetadata)


def peer_metadata(
    worker: Any, shape: Shape, addresses: Sequence[int], agent: bytes
) -> NixlAgentMetadata:
    """What a prefill worker with caches at these addresses would tell it."""
    lengths = [shape.block_bytes] * shape.num_regions
    return replace(
        own_metadata(worker),
        agent_metadata=agent,
        kv_caches_base_addr=list(addresses),
        block_lens=lengths,
        block_strides=list(lengths),
    )


def add_peer(worker: Any, metadata: NixlAgentMetadata) -> None:
    """A peer, with what the worker's handshake notes of it beside its lists."""
    name = worker.add_remote_agent(metadata, 0, 1)
    worker._remote_agents[metadata.engine_id][(0, 0)] = name
    worker._engine_by_address[(LOOPBACK, PORT)] = metadata.engine_id


def read_request(
    request_id: str, engine_id: str, local: Sequence[int], remote: Sequence[int]
) -> NixlConnectorMetadata:
    """What the scheduler tells the worker to make it read these blocks."""
    source = RemoteMeta(
        block_ids=[list(remote)],
        host=LOOPBACK,
        port=PORT,
        engine_id=engine_id,
        request_id=f"prefill-{request_id}",
    )
    metadata = NixlConnectorMetadata()
    metadata.reqs_to_recv[request_id] = ReqMeta(
        local_block_ids=[list(local)],
        local_physical_block_ids=[list(local)],
        tp_size=1,
        remote=source,
        awaiting_kvs=True,
    )
    return metadata
