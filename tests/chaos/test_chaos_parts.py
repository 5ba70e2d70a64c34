"""The pure parts of the chaos suite: what it judges by, and its report."""

from dataclasses import replace

import pytest

from tests.chaos.census import leak
from tests.chaos.faults import ACTIONS
from tests.chaos.judge import ERROR, RIGHT, WRONG, Answer, judge
from tests.chaos.schedule import KINDS
from tests.kit.parity import Completion

REFERENCE = Completion((1, 2), (5, 6), ({5: -0.1, 7: -3.0}, {6: -1.0, 8: -1.01}), "length")
BOUND = 10.0


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
