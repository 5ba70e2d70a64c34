"""`auto` on GPUs: who takes part by itself, in which engine, and who does not."""

from pathlib import Path
from typing import Any

import pytest

from tests.contract.by_itself_rank import ENDPOINTS, HIDDEN, TOKENS
from tests.contract.vllm_process import python_at_once, ranks
from vllm_commext.allreduce import limits

SCRIPT = Path(__file__).with_name("by_itself_rank.py")
LARGEST = TOKENS * HIDDEN * 2  # bytes of the engine's largest message
Found = list[dict[str, dict[str, Any]]]
ALONE = ("two nodes", "ray", "external launcher", "no model", "elastic", "no custom all-reduce")
ASIDE = ("eager", "no graphs", "dbo", "microbatches", "unlike")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found, by case."""
    store = tmp_path_factory.mktemp("store")
    environ = {"VLLM_COMMEXT_ALLREDUCE": "auto", "VLLM_COMMEXT_REDUCE_RMS": "auto"}
    return ranks(SCRIPT, 2, str(store / "store"), XDG_CACHE_HOME=str(store), **environ)


def cut(last_bytes: int) -> list[int]:
    """vLLM's ranges of numbers of tokens, with one that ends at a size of messages."""
    return sorted([*ENDPOINTS, last_bytes // (2 * HIDDEN)])


def assert_untouched(case: dict[str, Any]) -> None:
    """Nothing is made, no memory is taken, vLLM's methods are its own and compile as they would."""
    assert case["patched"] == []
    assert case["backends"] is None
    assert case["bytes"] == []
    assert not case["fused"]
    assert not case["pass"]
    assert case["endpoints"] == ENDPOINTS


@pytest.mark.parametrize("name", ["proven", "expert parallel", "lora and sleep"])
def test_on_a_proven_host_ours_takes_part_where_it_is_first(found: Found, name: str) -> None:
    for rank, of in enumerate(found):
        case = of[name]
        assert case["backends"] == [limits.NCCL, limits.PUSH]
        assert case["choices"] == [limits.VLLM, limits.PUSH]
        assert case["bytes"] == [LARGEST]
        assert case["fused"]
        assert "all_reduce" in case["patched"]
        assert case["pass"]
        assert case["norm"]
        assert case["endpoints"] == ENDPOINTS  # ours is first at every size of the built-in table
        lines = [line for line in case["log"] if "takes part by itself" in line]
        assert len(lines) == (rank == 0)
        assert not any(line.startswith(("WARNING", "ERROR")) for line in case["log"])


PROCESS = """
import multiprocessing, sys
import torch
from vllm_commext.compat import fits
fits.require_proven_gpus = lambda: None  # as on GPUs
name, gpus = sys.argv[1], int(sys.argv[2])
multiprocessing.current_process().name, torch.cuda.device_count = name, lambda: gpus
from vllm.plugins import load_general_plugins
load_general_plugins()
from tests.contract.by_itself_rank import patched
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
print(patched(CudaCommunicator))
"""


def test_only_workers_that_may_have_a_peer_have_vllms_class_patched() -> None:
    """`VllmWorker-N` is vLLM's name of a worker of its executor `mp`; at TP 1 the engine's process
    runs the model itself."""
    cases = (
        ("VllmWorker-0", "2"),
        ("EngineCore", "2"),
        ("MainProcess", "8"),
        ("VllmWorker-0", "1"),
    )
    worker, *others = python_at_once(PROCESS, cases, VLLM_COMMEXT_ALLREDUCE="auto")
    assert "all_reduce" in worker.stdout.splitlines()[-1], worker
    for done in others:
        assert done.stdout.splitlines()[-1:] == ["[]"], done


@pytest.mark.parametrize("name", ALONE)
def test_where_ranks_may_be_elsewhere_nobody_is_even_asked(found: Found, name: str) -> None:
    """Another host's rank may not have this package, and would never answer."""
    for of in found:
        assert_untouched(of[name])
        assert of[name]["exchanges"] == 0
        assert not of[name]["norm"]


@pytest.mark.parametrize("name", ASIDE)
def test_what_is_not_proven_is_left_to_vllm_by_all_ranks(found: Found, name: str) -> None:
    for of in found:
        assert_untouched(of[name])
        assert not of[name]["norm"]
        assert not any(line.startswith(("WARNING", "ERROR")) for line in of[name]["log"])


@pytest.mark.parametrize("name", ["unknown machine", "multicast", "no kernel"])
def test_where_no_table_holds_no_all_reduce_is_ours(found: Found, name: str) -> None:
    for of in found:
        assert_untouched(of[name])


def test_a_norm_is_ours_only_where_it_was_measured_faster(found: Found) -> None:
    for of in found:
        assert not of["unknown machine"]["norm"]
        assert of["multicast"]["norm"]  # vLLM's fused op does without


def test_batch_invariance_gets_one_order_of_sums_for_all_sizes(found: Found) -> None:
    for of in found:
        case = of["invariant"]
        assert case["choices"] == [limits.PUSH, limits.PUSH]
        assert case["fused"]
        assert case["pass"]
        assert case["norm"]


def test_graphs_are_cut_where_the_fused_op_begins_to_be_first(found: Found) -> None:
    for of in found:
        case = of["crossing table"]
        assert case["choices"] == [limits.VLLM, limits.VLLM]
        assert case["pass"]
        assert case["endpoints"] == cut(2 << 20)
        assert case["bytes"] == [LARGEST]  # the fused kernels' memory, not the table's 64 MiB


def test_sums_are_right_and_nothing_is_set_in_the_environment(found: Found) -> None:
    for of in found:
        for name, case in of.items():
            assert case["sum"] == 2.0, name
            assert case["environ"] == [], name
