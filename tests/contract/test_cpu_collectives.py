"""Rings in vLLM's own communicator of the CPUs: real ranks, and what is left alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch import distributed

from tests.contract.vllm_process import python, ranks
from tests.kit.servers import free_port
from vllm_commext.compat.cpu_collectives import is_meant, why_not

TOGGLE = "VLLM_COMMEXT_CPU_COLLECTIVES"
RANK = Path(__file__).with_name("cpu_collectives_rank.py")
LOOK = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm_commext import status
print([one.line() for one in status.recorded() if one.name == "cpu_collectives"][0])
"""
NO_EXTENSION = """
import sys
sys.modules["vllm_commext.shm._shm_ring"] = None
"""


def run_ranks(**environ: str) -> list[dict[str, Any]]:
    """What each rank found."""
    return ranks(RANK, 2, str(free_port()), **environ)


def test_sums_and_gathers_have_the_bits_of_gloos() -> None:
    found = run_ranks(**{TOGGLE: "1", "VLLM_COMMEXT_STRICT": "1"})
    assert [each.pop("gathered") for each in found] == [[0, 0, 1, 1], None]
    first, second = found
    assert first == second
    assert first["communicator"] == "CpuCommunicator"
    assert (first["served_by"], first["patched"]) == ("RingModule", True)
    assert all(first["sums"])
    assert all(first["gathers"])
    assert (len(first["sums"]), len(first["gathers"])) == (21, 18)
    assert first["odd"] == [True, False]


def test_turned_off_vllm_is_as_it_is() -> None:
    found = run_ranks(**{TOGGLE: "0"})
    assert (found[0]["served_by"], found[0]["patched"]) == ("module", False)


def communicator(**changes: Any) -> Any:
    fields = {"unique_name": "tp:0", "world_size": 2, "dist_module": distributed}
    return SimpleNamespace(**{**fields, "cpu_group": None, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"unique_name": "pp:0"}, False), ({"world_size": 1}, False)],
)
def test_whom_it_is_meant_for(changes: dict[str, Any], expected: bool) -> None:
    assert is_meant(communicator(**changes)) == expected


def test_vllms_own_shared_memory_keeps_what_it_serves() -> None:
    assert "own shared memory serves it" in why_not(communicator(dist_module=object()))


def test_without_the_extension_vllm_keeps_its_own() -> None:
    """As nothing to warn of, unless it was asked for."""
    line = python(NO_EXTENSION + LOOK).stdout.splitlines()[-1]
    assert line.startswith(f"commext: cpu_collectives off ({TOGGLE}=auto: the native extension is")
    line = python(NO_EXTENSION + LOOK, **{TOGGLE: "1"}).stdout.splitlines()[-1]
    assert line.startswith(
        "commext: cpu_collectives refused (the native extension vllm_commext.shm"
    )
    assert line.endswith("vLLM's own remain)")
