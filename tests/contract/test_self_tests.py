"""Parts that test themselves among ranks, where vLLM reads otherwise than all that were tested:
they serve where their test holds, and are left out on all ranks where it fails on one of them."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.contract.vllm_process import ranks
from tests.kit.ports import free_port
from tests.kit.untested import ENVIRON, WITHHOLD
from vllm_commext.allreduce import limits

HERE = Path(__file__).parent
BROKEN = """
import sys
from {module} import {owner}
def twice_too_much(original):
    def method(self, tensor):
        out = original(self, tensor)
        if sys.argv[1] == "1":
            (tensor if out is None else out).mul_(2)
        return out
    return method
{owner}.{name} = twice_too_much({owner}.{name})
"""
RINGS = BROKEN.format(module="vllm_commext.shm.collectives", owner="RingGroup", name="all_reduce")
NCCL = BROKEN.format(
    module="vllm_commext.allreduce.backend", owner="NcclBackend", name="all_reduce"
)

# Of one part, the last, `make test` has that it serves where its test holds; of each the opposite.
HOLDS = functools.partial(pytest.param, marks=pytest.mark.long)


def found(script: str, *args: str, first: str = "", **environ: str) -> list[dict[str, Any]]:
    """What two ranks of such a vLLM print."""
    return ranks(HERE / script, 2, *args, first=WITHHOLD + first, **{**ENVIRON, **environ})


@pytest.mark.parametrize(("first", "served_by"), [HOLDS("", "RingModule"), (RINGS, "module")])
def test_cpu_collectives(first: str, served_by: str) -> None:
    environ = {"VLLM_COMMEXT_CPU_COLLECTIVES": "1"}
    for each in found("cpu_collectives_rank.py", str(free_port()), first=first, **environ):
        assert each["served_by"] == served_by
        assert all(each["sums"] + each["gathers"])


@pytest.mark.parametrize(("first", "attached"), [HOLDS("", True), (NCCL, False)])
def test_all_reduce(tmp_path: Path, first: str, attached: bool) -> None:
    environ = {"VLLM_COMMEXT_ALLREDUCE": "1", "VLLM_COMMEXT_ALLREDUCE_BACKEND": limits.NCCL}
    args = ("2", str(tmp_path / "store"))
    for each in found("allreduce_ranks.py", *args, first=first, **environ):
        assert each["attached"] == [attached, False]
        assert each["sums"][0][0] == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]
