"""One of three ranks whose queues are made of process groups, for test_shm_queue: rank 1 writes to
the others, in a torch group and in a stateless one; then all write to rank 0. With `two` the last
rank is taken to be on another host. Prints as JSON the classes, the sums and the messages that
arrived.

    python tests/contract/queue_group_rank.py RANK PORT OTHER_PORT one|two
"""

import json
import sys

import torch
from torch import distributed as dist
from vllm.distributed.utils import StatelessProcessGroup
from vllm.plugins import load_general_plugins

load_general_plugins()

from vllm.distributed import parallel_state  # noqa: E402 - vLLM's class is replaced first
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue  # noqa: E402

WORLD = 3
NUM_ELEMENTS = 100_000


def main() -> None:
    rank, port, other_port = map(int, sys.argv[1:4])
    if sys.argv[4] == "two":
        parallel_state.in_the_same_node_as = lambda pg, source_rank: [True, True, False]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    stateless = StatelessProcessGroup.create("127.0.0.1", other_port, rank, WORLD)
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
    queue.wait_until_ready()
    for reader in readers:
        reader.wait_until_ready()
    queue.enqueue(f"from {rank}")
    received.append([reader.dequeue(timeout=60) for reader in readers])
    dist.barrier()
    sys.stdout.write(f"\n{json.dumps([classes, received])}\n")


if __name__ == "__main__":
    main()
