"""One of several ranks whose queues vLLM makes of groups; test_shm_queue.py starts it.

    python tests/contract/queue_ranks.py RANK one|two|coordinator PORT ...

Three ranks of one host, or where the last is taken to be on another, have queues of process groups:
rank 1 writes to the others, in a torch group and in a stateless one; then all write to rank 0. Two
of a coordinator have those of decode context parallelism over both, of ranks within one of several
data-parallel engines and, as the workers of an executor of several hosts, of a writer that is in no
group, and from all to the first. Prints as JSON the classes of the queues and what arrived."""

import json
import os
import sys
import threading
from typing import Any

import torch
from torch import distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.utils import StatelessProcessGroup
from vllm.plugins import load_general_plugins

load_general_plugins()

from vllm.distributed import parallel_state  # noqa: E402 - vLLM's class is replaced first
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue  # noqa: E402

NUM_ELEMENTS = 100_000


def of_process_groups(rank: int, hosts: str, port: str, other_port: str) -> list[Any]:
    if hosts == "two":
        parallel_state.in_the_same_node_as = lambda pg, source_rank: [True, True, False]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
    stateless = StatelessProcessGroup.create("127.0.0.1", int(other_port), rank, 3)
    received: list[object] = []
    classes: list[str] = []
    for group in (dist.group.WORLD, stateless):
        queue = MessageQueue.create_from_process_group(group, 1 << 16, 4, writer_rank=1)
        classes.append(type(queue).__name__)
        sent = {"array": torch.arange(NUM_ELEMENTS)} if rank == 1 else None
        got = sent or queue.dequeue(timeout=60)
        if sent:
            queue.enqueue(sent, timeout=60)
        received.append(int(got["array"].sum()))
    queue, handles = MessageQueue.create_from_process_group_single_reader(
        dist.group.WORLD, 1 << 16, 4, reader_rank=0
    )
    classes.append(type(queue).__name__)
    readers = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
    for each in (queue, *readers):
        each.wait_until_ready()
    queue.enqueue(f"from {rank}")
    received.append([reader.dequeue(timeout=60) for reader in readers])
    return [classes, received]


def of_coordinators(rank: int, port: str) -> list[Any]:
    os.environ["VLLM_DIST_IDENT"] = f"contract-{rank}"  # for vLLM's own shared memory
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(2, rank, address, rank, backend="gloo")
        parallel_state.initialize_model_parallel(2, decode_context_model_parallel_size=2)
        inner = parallel_state.init_model_parallel_group(
            [[0, 1]],
            rank,
            "gloo",
            use_message_queue_broadcaster=True,
            group_name="inner_dp_world",
            use_device_communicator=False,
        )
    classes, received = [], []
    for group in (parallel_state.get_tp_group(), parallel_state.get_dcp_group(), inner):
        classes.append(type(group.mq_broadcaster).__name__)
        received.append(group.broadcast_object(group.unique_name if rank == 0 else None))
    writer, handle, waiting = None, None, []
    if rank == 0:  # in the place of the executor's process
        writer = MessageQueue(2, 2, max_chunk_bytes=1 << 20)
        handle = writer.export_handle()
    reader = inner.create_mq_broadcaster(external_writer_handle=handle, blocking=False)
    answers, handles = inner.create_single_reader_mq_broadcasters(reader_rank_in_group=0)
    if writer is not None:
        waiting.append(threading.Thread(target=writer.wait_until_ready, daemon=True))
        waiting[0].start()
    reader.wait_until_ready()
    for thread in waiting:
        thread.join(60)
    if writer is not None:
        writer.enqueue("from who is in no group", timeout=60)
    received.append(reader.dequeue(timeout=60))
    readers = [MessageQueue.create_from_handle(each, 0) for each in handles]
    for queue in (answers, *readers):
        queue.wait_until_ready()
    answers.enqueue(rank, timeout=60)
    received.append([each.dequeue(timeout=60) for each in readers])
    return [[*classes, *(type(queue).__name__ for queue in (reader, answers))], received]


if __name__ == "__main__":
    number, kind, *ports = sys.argv[1:]
    if kind == "coordinator":
        found = of_coordinators(int(number), *ports)
    else:
        found = of_process_groups(int(number), kind, *ports)
    dist.barrier()
    sys.stdout.write(f"\n{json.dumps(found)}\n")
