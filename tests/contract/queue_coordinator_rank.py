"""One of two tensor-parallel ranks whose groups have queues as vLLM makes them, for test_shm_queue:
decode context parallelism over both ranks, ranks within one of several data-parallel engines, and
as the workers of an executor of several hosts, a writer that is in no group, and queues from all to
the first. Prints as JSON the classes and what arrived.

    python tests/contract/queue_coordinator_rank.py RANK PORT
"""

import json
import os
import sys
import threading

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.plugins import load_general_plugins

load_general_plugins()

from vllm.distributed import parallel_state  # noqa: E402 - vLLM's class is replaced first
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue  # noqa: E402

WORLD = 2


def main() -> None:
    rank, port = int(sys.argv[1]), sys.argv[2]
    os.environ["VLLM_DIST_IDENT"] = f"contract-{rank}"  # for vLLM's own shared memory
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            WORLD, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(WORLD, decode_context_model_parallel_size=WORLD)
        inner = parallel_state.init_model_parallel_group(
            [[*range(WORLD)]],
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
    writer, handle = None, None
    if rank == 0:  # in the place of the executor's process
        writer = MessageQueue(WORLD, WORLD, max_chunk_bytes=1 << 20)
        handle = writer.export_handle()
    reader = inner.create_mq_broadcaster(external_writer_handle=handle, blocking=False)
    answers, handles = inner.create_single_reader_mq_broadcasters(reader_rank_in_group=0)
    waiting = []
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
    classes += [type(queue).__name__ for queue in (reader, answers)]
    parallel_state.get_world_group().barrier()
    sys.stdout.write(f"\n{json.dumps([classes, received])}\n")


if __name__ == "__main__":
    main()
