"""The arithmetic of benchmarks/serve.py: quantiles, ratios that say who is better, CPU time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from serving import cpu, figures
from serving.figures import PERCENT, TOKENS_PER_SECOND, Sample
from serving.load import Answer, Outcome
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


def test_the_first_token_counts_by_itself_and_the_others_by_their_mean() -> None:
    outcome = Outcome([Answer(0.1, 0.7, (1, 2, 3, 4)), Answer(0.3, 0.5, (5, 6, 7, 8))], seconds=2.0)
    found = {name: value for name, _, value in figures.of_load(outcome)}
    assert found["time to first token, p50"] == pytest.approx(100)
    assert found["time to first token, p99"] == pytest.approx(300)
    assert found["time per output token, p99"] == pytest.approx(200)
    assert found["whole request, p99"] == pytest.approx(700)
    assert found["throughput"] == 4.0


def test_threads_count_from_their_start_and_those_of_gloo_apart() -> None:
    gloo = f"single {cpu.WORKER}, {cpu.GLOO}"
    before = {("single worker", 1): 5.0, (gloo, 2): 1.0}
    after = {("single worker", 1): 6.0, ("single worker", 3): 0.5, (gloo, 2): 1.25}
    spent = cpu.used(before, after)
    assert spent == {"single worker": 1.5, gloo: 0.25}
    found = figures.of_silence({**spent, "single API server": 9.0}, seconds=10.0)
    assert found[:2] == [
        ("idle, engines and workers", PERCENT, 17.5),
        ("idle, engines and workers without gloo's threads", PERCENT, 15.0),
    ]


def test_where_torch_does_not_name_gloos_threads_nothing_is_said_of_them() -> None:
    found = figures.of_silence({"single worker": 1.5}, seconds=10.0)
    assert [name for name, _, _ in found] == ["idle, engines and workers", "idle, single worker"]
