"""One of two ranks whose groups share a device of Gloo's; test_gloo.py starts it.

    python tests/contract/gloo_rank.py RANK PORT OTHER_PORT

Makes groups as vLLM does, sums in each of them, and in all at once from threads. Prints as JSON how
many threads of Gloo's devices there are after each step, and the sums.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

from vllm_commext.compat import gloo, monkey_patch
from vllm_commext.testing.processes import thread_names
from vllm_commext.testing.servers import GLOO_THREAD

WORLD, NUM_GROUPS, NUM_SUMS = 2, 6, 50
LIMIT = timedelta(seconds=60)


def num_threads() -> int:
    """Of Gloo's devices in this process."""
    return thread_names("self").count(GLOO_THREAD)


def sums(group: object, size: int) -> set[float]:
    """Each of many sums over the ranks, of tensors of `size` elements."""
    found: set[float] = set()
    for number in range(NUM_SUMS):
        values = torch.full((size,), float(number + 1))
        dist.all_reduce(values, group=group)
        found |= set((values / (number + 1)).unique().tolist())
    return found


def main() -> None:
    rank, port, other_port = map(int, sys.argv[1:])
    gloo.install()
    gloo.install()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD, timeout=LIMIT
    )
    threads = [num_threads()]
    groups = [dist.new_group(backend="gloo", timeout=LIMIT) for _ in range(NUM_GROUPS)]
    threads.append(num_threads())
    in_turn = set[float]().union(*(sums(group, 1000) for group in groups))
    sizes = [1 << (3 * number) for number in range(NUM_GROUPS)]
    with ThreadPoolExecutor(NUM_GROUPS) as pool:
        at_once = set[float]().union(*pool.map(sums, groups, sizes))
    dist.monitored_barrier(timeout=LIMIT)  # torch refuses it for groups of another class
    for group in groups[1:]:
        dist.destroy_process_group(group)
    after = sums(groups[0], 10)
    stateless = stateless_init_torch_distributed_process_group(
        "127.0.0.1", other_port, rank, WORLD, "gloo"
    )
    threads.append(num_threads())
    monkey_patch.restore(monkey_patch.row_of(gloo.SYMBOL))
    dist.new_group(backend="gloo", timeout=LIMIT)
    threads.append(num_threads())
    found = {
        "threads": threads,
        "sums": sorted(in_turn | at_once | after),
        "timeouts": [
            group._get_backend(torch.device("cpu")).options._timeout == LIMIT
            for group in groups[:1]
        ],
        "stateless": stateless.size(),
        "class": distributed_c10d.ProcessGroupGloo.__name__,
    }
    dist.barrier()
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
