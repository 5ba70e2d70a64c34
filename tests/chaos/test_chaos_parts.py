"""The pure parts of the chaos suite: what it judges by, and its report."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.chaos.census import MAX_MORE_BYTES, MAX_MORE_DESCRIPTORS, Census, growth, leak
from tests.chaos.faults import ACTIONS
from tests.chaos.judge import ERROR, LATE, RIGHT, WRONG, Answer, Recovery, judge
from tests.chaos.report import FaultRecord, RunRecord, as_markdown, failures
from tests.chaos.schedule import KINDS
from tests.kit.parity import Completion
from vllm_commext.proxy.errors_phases import Resume

REFERENCE = Completion((1, 2), (5, 6), ({5: -0.1, 7: -3.0}, {6: -1.0, 8: -1.01}), "length")
BOUND = 10.0
GOOD = Recovery(1, 0.5, succeeded=True)


def answer(completion: Completion | None, seconds: float = 1.0) -> Answer:
    return Answer(seconds, completion, "" if completion else "HTTP 500")


def test_every_kind_has_an_action() -> None:
    assert set(ACTIONS) == set(KINDS)


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (REFERENCE, RIGHT),
        (replace(REFERENCE, token_ids=(5, 8)), RIGHT),
        (replace(REFERENCE, token_ids=(7, 6)), WRONG),
        (replace(REFERENCE, token_ids=(5,), logprobs=REFERENCE.logprobs[:1]), WRONG),
        (replace(REFERENCE, logprobs=({5: -0.2, 7: -3.0}, REFERENCE.logprobs[1])), WRONG),
        (None, ERROR),
    ],
)
def test_an_answer_is_judged_by_its_tokens_and_logprobs(
    got: Completion | None, verdict: str
) -> None:
    assert judge(REFERENCE, answer(got), BOUND) == verdict


def test_lateness_hides_no_wrong_token() -> None:
    wrong = replace(REFERENCE, token_ids=(7, 6))
    assert judge(REFERENCE, answer(REFERENCE, 11.0), BOUND) == LATE
    assert judge(REFERENCE, answer(None, 11.0), BOUND) == LATE
    assert judge(REFERENCE, answer(wrong, 11.0), BOUND) == WRONG


@pytest.mark.parametrize(
    ("recovery", "failed", "failed_timed"),
    [
        (GOOD, False, False),
        (Recovery(3, 0.5, succeeded=True), False, True),
        (Recovery(1, 5.5, succeeded=True), False, True),
        (Recovery(9, 40.0, succeeded=False), True, True),
    ],
)
def test_a_run_fails_by_its_recoveries(
    recovery: Recovery, failed: bool, failed_timed: bool
) -> None:
    record = RunRecord({}, [FaultRecord(1, "kill_prefill", recovery)])
    assert bool(failures(record, timed=False)) == failed
    assert bool(failures(record)) == failed_timed


@pytest.mark.parametrize(
    "change",
    [
        {"verdicts": Counter({WRONG: 1})},
        {"verdicts": Counter({LATE: 1})},
        {"problems": ["end: 1 more threads"]},
        {"faults": [FaultRecord(1, "kill_prefill", GOOD, ("processes ended",))]},
    ],
)
def test_a_run_fails_by_everything_else_that_must_hold(change: dict[str, object]) -> None:
    good = RunRecord({"seed": 1}, [FaultRecord(1, "kill_prefill", GOOD)], Counter(right=3))
    assert failures(good) == []
    assert "PASSED" in as_markdown(good)
    bad = replace(good, **change)
    assert failures(bad) != []
    assert "FAILED" in as_markdown(bad)


@pytest.mark.parametrize(
    ("why", "talks", "failed"),
    [
        (Resume.RESUMED, False, False),
        (Resume.ENDPOINT, False, True),
        (Resume.ENDPOINT, True, False),
        (Resume.FAILED, True, True),
    ],
)
def test_a_stream_that_breaks_off_fails_a_run_unless_its_endpoint_has_no_other_end(
    why: Resume, talks: bool, failed: bool
) -> None:
    settings = {"spares": True, "talks": talks}
    assert bool(failures(RunRecord(settings, resumes=Counter({why: 1})))) == failed


def test_growth_beyond_its_tolerance_is_found() -> None:
    before = Census(frozenset({1, 2}), 100, 20, 1 << 30)
    assert growth(before, before) == []
    assert growth(before, replace(before, descriptors=100 + MAX_MORE_DESCRIPTORS)) == []
    for change in (
        {"descriptors": 101 + MAX_MORE_DESCRIPTORS},
        {"threads": 40},
        {"heap_bytes": before.heap_bytes + MAX_MORE_BYTES + 1},
        {"pids": frozenset({1})},
    ):
        assert len(growth(before, replace(before, **change))) == 1


# In MiB, of a decode engine: it grows by 130 as it sees its first batches, a big step comes late.
MEASURED = [162, 218, 245, 246, 246, 266, 284, 288, 288, 289, 289, 321, 321]
LONG = MEASURED + [321 + number // 4 for number in range(5)]


def test_memory_that_comes_in_single_steps_is_no_leak() -> None:
    assert leak([size << 20 for size in LONG]) == []


@pytest.mark.parametrize("leaked_mib", [1, 2, 40])
def test_a_buffer_that_leaks_at_every_fault_is_found_among_such_steps(leaked_mib: int) -> None:
    sizes = [(size + leaked_mib * number) << 20 for number, size in enumerate(LONG)]
    [problem] = leak(sizes)
    assert "more memory from one fault to the next" in problem
