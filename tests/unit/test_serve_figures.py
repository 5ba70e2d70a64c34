"""The arithmetic of benchmarks/serve.py: quantiles and ratios."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from serving import figures
from serving.figures import TOKENS_PER_SECOND, Sample
from serving.servers import OFF, ON

NUMBERS = st.lists(st.integers(-1000, 1000), min_size=1, max_size=50)


@given(NUMBERS, st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_the_smallest_that_enough_values_do_not_exceed(
    values: list[int], share: float
) -> None:
    enough = [one for one in values if sum(other <= one for other in values) >= share * len(values)]
    assert figures.quantile(values, share) == min(enough)


@pytest.mark.parametrize(("unit", "expected"), [("ms", 2.0), (TOKENS_PER_SECOND, 0.5)])
def test_more_than_one_says_that_on_is_better(unit: str, expected: float) -> None:
    values = {OFF: [10.0, 20.0, 40.0], ON: [5.0, 10.0, 20.0]}
    samples = [
        Sample("cell", name, number, "figure", unit, value)
        for name, found in values.items()
        for number, value in enumerate(found)
    ]
    [row] = figures.rows_of(samples)
    assert (row.off, row.on) == (20.0, 10.0)
    assert row.ratios == (expected,) * 3
