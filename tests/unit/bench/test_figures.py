"""Percentiles, goodput and the verdict on two contestants."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.bench import figures
from vllm_commext.bench.figures import Comparison, Sample
from vllm_commext.limits import Limits

LIMITS = Limits(0.015, 1.0)


def sample(first: float = 0.5, tpot: float = 0.01, error: str = "") -> Sample:
    return Sample(0.0, 100, 11, first, first + 10 * tpot, 0.1, error)


@pytest.mark.parametrize(
    ("one", "is_good"),
    [
        (sample(), True),
        (sample(first=1.01), False),
        (sample(tpot=0.0151), False),
        (sample(error="late"), False),
        (Sample(0.0, 1, 1, 0.5, 0.5), True),
    ],
)
def test_a_good_request_keeps_both_limits_and_does_not_fail(one: Sample, is_good: bool) -> None:
    assert one.is_good(LIMITS) == is_good
    assert figures.num_good([one, one], LIMITS) == 2 * is_good


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = figures.quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    smaller = [value for value in values if value < found]
    assert len(smaller) < share * len(values) + 1e-9


def test_failed_requests_count_in_no_figure_but_their_own() -> None:
    found = [sample(), sample(error="a"), sample(error="b"), sample(error="b")]
    assert figures.errors(found) == {"b": 2, "a": 1}
    assert figures.summary(found)["first"] == [0.5, 0.5, 0.5]
    assert figures.tokens_per_second(found) == pytest.approx(11 / 0.6)
    assert figures.tokens_per_second([sample(error="a")]) == 0
    assert math.isnan(figures.summary([])["gap"][0])


def rounds(*good: int, of: int = 100) -> list[list[Sample]]:
    return [[sample()] * count + [sample(first=2)] * (of - count) for count in good]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (rounds(50, 52), rounds(60, 61), "B serves 1.19x the requests of A .*worth it"),
        (rounds(60, 61), rounds(50, 52), "B serves 0.84x .*not worth it"),
        (rounds(50, 60), rounds(60, 61), r"no difference beyond noise: .*\(noise 20 %\)"),
        (rounds(50), rounds(60), "1.20x .*one round shows no noise"),
        (rounds(100, 99), rounds(99, 100), "raise it to see one"),
        (rounds(300, 300, 300, of=300), rounds(297, 297, 297, of=300), "both serve all but 9 "),
        (rounds(0, 0), rounds(0, 0), "neither A nor B serves any"),
        (rounds(0, 0), rounds(50, 50), r"many times .*\(noise 4 %\): worth it"),
        (rounds(0, 0), rounds(1, 1), r"no difference .*\(noise 200 %\)"),
        (rounds(0, 9), rounds(8, 9), "no difference .*without bound"),
        ([[sample(error="x")] * 4] * 2, rounds(4, 4, of=4), "nothing can be said.*8 of 8 of A"),
        (
            [[*rounds(98)[0][:-1], sample(error="x")]] * 2,
            rounds(50, 50),
            "not worth it; 2 of 200 of A failed",
        ),
    ],
)
def test_the_verdict_is_one_sentence_to_act_upon(
    first: list[list[Sample]], second: list[list[Sample]], said: str
) -> None:
    found = figures.compare(first, second, LIMITS)
    text = figures.verdict(("A", "B"), found)
    assert "\n" not in text
    assert re.search(said, text)
    assert found.differs == ("worth it" in text)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=5))
def test_the_same_against_itself_is_no_difference(good: list[int]) -> None:
    same = rounds(*good, of=50)
    found = figures.compare(same, same, LIMITS)
    assert found == Comparison(
        LIMITS, (sum(good), sum(good)), (0, 0), 50 * len(good), len(good), found.noise
    )
    assert not found.differs
