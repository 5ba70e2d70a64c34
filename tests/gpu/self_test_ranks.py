"""One rank of the checks of parts that test themselves; test_self_tests.py starts one a GPU.

    python tests/gpu/self_test_ranks.py RANK WORLD_SIZE PORT [CHECK ...]

This vLLM is to them one that no test was run on and that reads unlike all others. Each part serves
as its test holds; where it does not, see tests/contract/test_self_tests.py. Rank 0 prints a line of
JSON a check.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.kit.gpu_ranks import checks_of, run_checks
from tests.kit.untested import ENVIRON, withhold_evidence
from vllm_commext import plugin, status
from vllm_commext.allreduce import limits, machine
from vllm_commext.collective import Collective
from vllm_commext.compat import allreduce, fused_pass
from vllm_commext.compat.monkey_patch import is_patched
from vllm_commext.compat.tp_group import tensor_parallel

TOGGLES = {
    **ENVIRON,
    "VLLM_COMMEXT_ALLREDUCE": "1",
    "VLLM_COMMEXT_ALLREDUCE_BACKEND": limits.PUSH,
}
Figures = dict[str, Any]


class Rank:
    def __init__(self, group: Any) -> None:
        self.communicator = group.device_communicator
        self.collective = Collective.over(group.cpu_group)
        self.rank = group.rank_in_group


def check_all_reduce(rank: Rank) -> Figures:
    """The communicator was made with a dispatcher that had passed its test."""
    made = allreduce.dispatcher_of(rank.communicator)
    assert made is not None
    assert limits.PUSH in made.backends
    return {"backends": list(made.backends)}


def check_fused_norm(rank: Rank) -> Figures:
    """Its test has let the pass in."""
    del rank
    assert is_patched(fused_pass.CONFIGURE)
    return {"patched": True}


CHECKS: dict[str, Callable[[Rank], Figures]] = checks_of(globals())


def main() -> None:
    rank, world, port = (int(text) for text in sys.argv[1:4])
    machine.keep_off_multicast()
    os.environ.update(TOGGLES)
    withhold_evidence()
    plugin.register()
    states = {one.name: one.line() for one in status.recorded()}
    assert "active" in states["allreduce"], states
    with tensor_parallel(rank, world, port) as group, torch.no_grad():
        run_checks(Rank(group), CHECKS, sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
