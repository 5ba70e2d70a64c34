"""The short form of the doctor's report, and what it offers to switch on."""

import re
from pathlib import Path

import pytest

from vllm_commext.cli.report import OFFER, OFFERED, Check, Level, as_summary, can_offer
from vllm_commext.settings import TOGGLES

NATIVE = Check("package", "native queue", "built", Level.OK)
PEERS = Check("gpu", "peer access", "all 2 pairs", Level.OK)
NO_PEERS = Check("gpu", "peer access", "not 0->1, 1->0", Level.WARNING)


def off(*names: str) -> list[Check]:
    return [Check("capabilities", name, f"off (VLLM_COMMEXT_{name.upper()}=0)") for name in names]


@pytest.mark.parametrize(
    ("levels", "verdict"),
    [
        ((), "ready"),
        ((Level.WARNING,), "ready, with warnings (1 warning)"),
        ((Level.ERROR, Level.WARNING, Level.WARNING), "broken (1 error, 2 warnings)"),
    ],
)
def test_the_verdict_comes_first(levels: tuple[Level, ...], verdict: str) -> None:
    checks = [NATIVE, *(Check("gpu", f"c{k}", "v", level) for k, level in enumerate(levels))]
    assert as_summary(checks).splitlines()[0].partition(": ")[2] == verdict


def test_what_is_amiss_stands_before_the_groups_with_its_remedy() -> None:
    broken = Check("machine", "/dev/shm", "64 MiB free", Level.WARNING, "give it --shm-size=1g")
    lines = as_summary([NATIVE, broken]).splitlines()
    assert lines[2:4] == [
        "  WARN machine, /dev/shm: 64 MiB free",
        "       -> give it --shm-size=1g",
    ]
    assert lines[4].startswith("  ok   package")
    assert lines[5].startswith("  WARN machine")


def test_a_group_is_one_line_that_counts_what_holds() -> None:
    checks = [Check("reads", f"s{k}", "holds", Level.OK) for k in range(3)]
    checks.append(Check("reads", "s3", "gone", Level.ERROR))
    assert "  FAIL reads          3 of 4 hold" in as_summary(checks).splitlines()


def test_only_what_was_set_is_named_among_the_toggles() -> None:
    checks = [
        Check("toggles", "A", "1 (default)", Level.OK),
        Check("toggles", "B", "0 (environment)", Level.OK),
    ]
    assert "set: B=0" in as_summary(checks)
    assert "all at their defaults" in as_summary(checks[:1])


def test_gpus_are_counted_and_named() -> None:
    cards = [Check("gpu", f"GPU {k}", "NVIDIA H200, 140 GiB, sm_90", Level.OK) for k in range(2)]
    assert "2 x NVIDIA H200, 140 GiB, sm_90; peer access: all 2 pairs" in as_summary(
        [*cards, PEERS]
    )


def h200(count: int) -> list[Check]:
    name = "NVIDIA H200, 140 GiB, sm_90"
    return [PEERS, *(Check("gpu", f"GPU {number}", name, Level.OK) for number in range(count))]


def test_only_what_is_off_and_was_measured_on_such_gpus_is_offered() -> None:
    every = off("shm_queue", "reduce_rms", "allreduce")
    assert can_offer([*h200(2), *every])
    assert not can_offer([*h200(3), *every])
    assert not can_offer([NO_PEERS, *h200(2)[1:], *every])
    other = Check("gpu", "GPU 1", "NVIDIA A100", Level.OK)
    assert not can_offer([PEERS, h200(1)[1], other, *every])
    active = [Check("capabilities", "reduce_rms", "active", Level.OK)]
    assert not can_offer([*h200(2), *active])


def test_an_offer_is_a_line_to_paste_that_its_toggle_takes() -> None:
    text = as_summary([*h200(2), *off("reduce_rms")])
    assert "  export VLLM_COMMEXT_REDUCE_RMS=auto" in text.splitlines()
    choices = {toggle.name: toggle.choices for toggle in TOGGLES}
    name, _, value = OFFER.partition("=")
    assert value in choices[name]


def test_the_figures_of_an_offer_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| QK RMSNorm (g)")]
    speedups = sorted(found for row in rows for found in re.findall(r"(\d\.\d\d)x", row))
    assert f"takes {speedups[0]}x to {speedups[-1]}x less" in OFFERED


def test_without_vllm_the_verdict_says_so_and_the_problem_is_said_once() -> None:
    missing = Check("vllm", "vllm", "not installed", Level.WARNING, "pip install vllm")
    lines = as_summary([NATIVE, missing]).splitlines()
    assert "vLLM is not installed, only `proxy` and `bench` can run here" in lines[0]
    assert sum("not installed" in line for line in lines[1:]) == 1


def test_what_is_decided_later_is_not_called_active() -> None:
    names = ("nixl", "allreduce")
    checks = [Check("capabilities", name, "active", Level.OK) for name in names]
    text = " ".join(as_summary([*checks, *off("reduce_rms")]).split())
    assert "on: nixl (in engines that name it), allreduce (decided for each group of ranks)" in text


def test_no_line_is_too_long() -> None:
    checks = [NATIVE, PEERS, *off("shm_queue", "reduce_rms", "allreduce")]
    checks.append(Check("vllm", "vllm", "word " * 60, Level.WARNING, "do " * 60))
    assert max(map(len, as_summary(checks).splitlines())) <= 100
