"""One rank of the checks of vLLM's own communicator over gloo; test_allreduce.py starts it.

    python tests/contract/allreduce_ranks.py RANK WORLD_SIZE STORE_FILE

Prints what it found as the last line, in JSON."""

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed


def fused(*communicators: Any) -> list[Any]:
    """What our op makes of ones and a residual of ones for each communicator's group."""
    from vllm_commext.allreduce.fused.op import all_reduce_add_rms_norm
    from vllm_commext.errors import ConfigError

    ones, found = torch.ones(2, 16), []
    for communicator in communicators:
        try:
            outs = all_reduce_add_rms_norm(ones, ones, ones[0], 0.0, communicator.unique_name)
        except ConfigError as error:
            found.append(str(error))
        else:
            found.append([out.unique().tolist() for out in outs[:2]])
    return found


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    environ = dict(os.environ)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    distributed.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=60), world_size=world, rank=rank
    )
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from vllm_commext.allreduce.machine import NO_MULTICAST
    from vllm_commext.compat import allreduce
    from vllm_commext.compat.allreduce import dispatcher_of

    group = distributed.group.WORLD

    def make(name: str) -> Any:
        return CudaCommunicator(group, torch.device("cpu"), group, name)

    def try_checkpoint(communicator: Any) -> str:
        try:
            communicator.checkpoint_prepare()
        except Exception as error:  # noqa: BLE001 - the test says which it should be
            return f"{type(error).__name__}: {error}"
        return ""

    tp, other = make("tp:0"), make("pp:0")
    found: dict[str, Any] = {
        "attached": [dispatcher_of(each) is not None for each in (tp, other)],
        "same_class": type(tp) is CudaCommunicator,
    }
    sums: list[Any] = []
    for tensor in (torch.arange(6.0).reshape(2, 3) + rank, torch.ones(4, dtype=torch.int64)):
        kept = tensor.clone()
        sums.append([each.all_reduce(tensor).tolist() for each in (tp, other)])
        sums.append(torch.equal(tensor, kept))
    found["sums"] = sums
    found["fused"] = fused(tp, other)
    dispatcher = dispatcher_of(tp)
    found["served"] = dict(dispatcher.counts()[0]) if dispatcher else {}
    found["checkpoint"] = [try_checkpoint(each) for each in (tp, other)]
    tp.destroy()
    other.destroy()
    found["after_destroy"] = dispatcher_of(tp) is None and tp.all_reduce(torch.ones(1)).tolist()
    found["reasons"] = [bool(allreduce.why_not(other)), allreduce.why_not(tp)]
    found["environ"] = sorted(
        name for name in NO_MULTICAST if os.environ.get(name) != environ.get(name)
    )
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
