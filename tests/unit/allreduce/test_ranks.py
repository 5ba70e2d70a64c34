"""Two real processes over gloo: they choose alike, and what fails on one fails on both."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("ranks.py")
ROOT = Path(__file__).parents[3]
WORLD = 2
TIMEOUT_SECONDS = 200
pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS + 40)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    store = tmp_path_factory.mktemp("store") / "store"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(WORLD), str(store)],
            env={**environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(store.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        texts = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(30)
    assert [process.returncode for process in processes] == [0] * WORLD, texts
    lines = [[json.loads(line) for line in out.splitlines()] for out, _ in texts]
    return [{line["check"]: line["found"] for line in of_rank} for of_rank in lines]


def test_objects_travel(found: list[dict[str, Any]]) -> None:
    for rank in found:
        values = rank["values"]
        assert values["run"] == [0, 10]
        assert values["inside"] == [[[0, 1], 1]] * WORLD
        assert values["split"] == [True] * WORLD
        assert "expected one colour" in values["other_split"]


def test_a_failure_at_any_point_is_everybodys(found: list[dict[str, Any]]) -> None:
    for rank in found:
        *failures, uneven, inference = rank["failures"]
        assert [failures[2 * at] for at in range(4)] == [
            f"rank 1: ValueError: at {at}" for at in range(4)
        ]
        assert [failures[2 * at + 1] for at in range(4)] == [str([at, at]) for at in range(4)]
        assert "different numbers of steps" in uneven
        assert inference == str(["in inference mode"] * 2)


def test_a_backend_that_fails_on_one_rank_is_nowhere(found: list[dict[str, Any]]) -> None:
    for rank in found:
        made = rank["creation"]
        assert made["backends"] == ["nccl"]
        assert made["sum"] == [2.0] * 4
        assert made["served"] == {"nccl": 1}
        assert made["refused"] == {"flashinfer_one_shot": 1, "custom": 1}
        assert made["origin"] == "of rank 0"
        assert "expected the same settings on all ranks" in made["other_settings"]


def test_a_creation_that_ends_midway_leaves_nothing_behind(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["creation_that_ends_midway"] == ["destroy flashinfer_one_shot"]


def test_a_workspace_is_made_on_all_ranks_or_on_none(found: list[dict[str, Any]]) -> None:
    for rank in found:
        made, device_bytes, released, left, same_random_state, world = rank["workspace"]
        assert made[0] is made[2] is None
        assert made[1] == made[3]
        assert made[1][0].endswith("('handle 0', 'handle 1')")
        assert made[4] is None  # the one before has used the budget up
        assert 0 < device_bytes <= 1 << 20
        assert (released, left, world) == (1, 0, WORLD)
        assert same_random_state


def test_a_group_starts_with_what_is_known_of_rank_0s_machine(found: list[dict[str, Any]]) -> None:
    for rank in found:
        start = rank["start"]
        assert start["unknown"]
        assert start["built in"] == [["nccl"], "built in, 2 x NVIDIA H200", [2.0] * 8]
        assert start["lines"][0] == "made on all ranks: nccl"
        assert start["lines"][1].startswith("bfloat16: flashinfer_one_shot up to ")
        assert start["forced"]
        assert start["eager"]
        assert start["microbatches"]
        assert start["eager, forced"]
        assert start["invariant"] == ["push"]
        for what in ("without our kernel", "unknown", "forced"):
            assert start[f"invariant, {what}"] is None
        assert start["broken"] == "rank 1: OSError: no driver"


def test_by_itself_only_a_kernel_of_ours_takes_part_and_only_where_it_comes_first(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        start = rank["start"]
        # 8 KiB and 512 KiB are FlashInfer's in the table, 4 MiB and 8 MiB ours; float32 is unknown.
        assert start["by itself"] == ["vllm", "vllm", "push", "push", "vllm"]
        assert start["by itself, backends"] == ["nccl", "push"]
        assert start["by itself, bytes"] == [8 << 20]  # not the table's 64 MiB
        [line] = start["by itself, lines"]
        assert line.startswith("takes part by itself: bfloat16: vllm up to 1")
        aside = (
            *("an unknown machine", "another dtype", "multicast", "eager", "microbatches"),
            *("never first", "without our kernel", "GPUs without gain in engines"),
        )
        for what in aside:
            assert start[f"by itself, {what}"] in (True, None), what
        assert start["by itself, invariance"] is False


def test_what_decides_is_agreed_about_by_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        facts = rank["facts"]
        assert facts["alike"] == 64
        assert facts["two hosts"] == "its ranks are on 2 hosts"
        assert "settings" in facts["unlike"]
        assert "set the toggles alike" in facts["unlike"]
        assert "hidden [64, 65]" in facts["dtypes"]
        assert facts["broken"] == "rank 1: OSError: no driver"


def test_nccl_is_reached_through_torch_where_vllm_has_no_binding(
    found: list[dict[str, Any]],
) -> None:
    for rank, values in enumerate(found):
        assert values["nccl_through_torch"] == ["torch", [3.0] * 3, [rank + 1.0] * 3]
