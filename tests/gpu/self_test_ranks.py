"""One rank of the checks of parts that test themselves; test_self_tests.py starts one a GPU.

    python tests/gpu/self_test_ranks.py RANK WORLD_SIZE PORT [CHECK ...]

This vLLM is to them one that nobody has tested and that reads unlike all others. Each part serves
where its test holds, and is left out on all ranks where one of them has wrong numbers. Rank 0
prints a line of JSON a check.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.contract.qk_norms_rank import CASES
from tests.kit.gpu_ranks import checks_of, run_checks
from tests.kit.untested import ENVIRON, withhold_evidence
from vllm_commext import plugin, status
from vllm_commext.allreduce import limits, multicast
from vllm_commext.allreduce.backends.push import PushBackend
from vllm_commext.collective import Collective
from vllm_commext.compat import allreduce, fused_pass, reduce_rms, reduce_rms_models
from vllm_commext.compat.monkey_patch import is_patched, row_of
from vllm_commext.compat.tp_group import tensor_parallel
from vllm_commext.reduce_rms import ops

TOGGLES = {
    **ENVIRON,
    "VLLM_COMMEXT_ALLREDUCE": "1",
    "VLLM_COMMEXT_ALLREDUCE_BACKEND": limits.PUSH,
    "VLLM_COMMEXT_REDUCE_RMS": "1",
}
MODELS = [name for name in CASES if name != reduce_rms.MODEL]  # of the real model's shapes alone
Figures = dict[str, Any]


class Rank:
    def __init__(self, group: Any) -> None:
        self.group, self.communicator = group, group.device_communicator
        self.collective = Collective.over(group.cpu_group)
        self.rank = group.rank_in_group


@contextmanager
def wrong_on_the_last_rank(rank: Rank, owner: Any, name: str) -> Iterator[None]:
    """What a function returns is twice as much there."""
    original = getattr(owner, name)

    def wrong(*args: Any) -> Any:
        out = original(*args)
        if rank.rank != rank.collective.world_size - 1:
            return out
        return out * 2 if torch.is_tensor(out) else tuple(part * 2 for part in out)

    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, original)


def check_all_reduce(rank: Rank) -> Figures:
    """The communicator was made with a dispatcher that had passed its test."""
    made = allreduce.dispatcher_of(rank.communicator)
    assert made is not None
    assert limits.PUSH in made.backends
    return {"backends": list(made.backends)}


def check_fused_norm(rank: Rank) -> Figures:
    """Its test has let the pass in."""
    del rank
    assert is_patched(row_of(fused_pass.CONFIGURE))
    return {"patched": True}


def check_wrong_sums(rank: Rank) -> Figures:
    """Of one rank cost all of them the dispatcher, and no rank waits for another."""
    allreduce._give_back(rank.communicator)
    with wrong_on_the_last_rank(rank, PushBackend, "all_reduce"):
        allreduce.attach(rank.communicator)
    assert allreduce.dispatcher_of(rank.communicator) is None
    allreduce.attach(rank.communicator)
    assert allreduce.dispatcher_of(rank.communicator) is not None
    return {"left": 1}


def _serve(rank: Rank) -> list[str]:
    """Models whose first layer keeps the op after its test; made as vLLM makes a model."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    try:
        for model in MODELS:
            CASES[model](rank.rank)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("cpu")
    return [name for name in MODELS if not reduce_rms_models._failures[name]]


def check_norms(rank: Rank) -> Figures:
    """Every model's norm passes its test, and so has the op."""
    served = _serve(rank)
    assert served == MODELS, reduce_rms_models._failures
    assert set(MODELS) <= reduce_rms._told
    return {"models": len(served)}


def check_wrong_norms(rank: Rank) -> Figures:
    """Of one rank leave every model to vLLM on all of them."""
    reduce_rms_models._failures.clear()
    with wrong_on_the_last_rank(rank, ops, "_launch"):
        served = _serve(rank)
    assert served == []
    return {"models": len(served)}


CHECKS: dict[str, Callable[[Rank], Figures]] = checks_of(globals())


def main() -> None:
    rank, world, port = (int(text) for text in sys.argv[1:4])
    multicast.keep_off()
    os.environ.update(TOGGLES)
    withhold_evidence()
    plugin.register()
    states = {one.name: one.line() for one in status.recorded()}
    assert "active" in states["allreduce"], states
    assert "active" in states["reduce_rms"], states
    with tensor_parallel(rank, world, port) as group, torch.no_grad():
        run_checks(Rank(group), CHECKS, sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
