"""The demo takes the scenario that suits its model and sizes, and its claims fail when they should.
Metrics that are absent do not read as zero."""

import argparse
from pathlib import Path

import pytest

from tests.kit.demo import __main__ as demo
from tests.kit.demo.report import (
    NOISE_MARGIN,
    Expected,
    Noise,
    Pass,
    Traffic,
    table,
    verdict,
)
from tests.kit.metrics import parse
from tests.kit.parity import Completion
from vllm_commext.errors import ConfigError

PAGE = 'vllm:commext_nixl_bytes_total{engine="0"} 1024.0\n'
GOOD = Traffic(num_blocks=3, num_bytes=384, num_reads=1, seconds=0.002, num_failures=0)
NEEDED = Expected(384, 3)


def completion(token: int, logprob: float) -> Completion:
    return Completion((1, 2), (token,), ({token: logprob, 99: -3.0},), "length")


def one_pass(
    got: Completion, noise: Noise, traffic: Traffic = GOOD, expected: Expected = NEEDED
) -> Pass:
    differences = noise.compare_all([completion(5, -1.0)], [got])
    return Pass("test", [got], differences, traffic, expected)


def test_an_absent_metric_is_an_error_that_names_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"commext_nixl_byte_total.*commext_nixl_bytes_total"):
        parse(PAGE).total("vllm:commext_nixl_byte_total")


def test_equal_answers_and_all_bytes_hold() -> None:
    exact = Noise((True,), 0.0)
    one = one_pass(completion(5, -1.0), exact)
    assert one.claim_equal(exact).held
    assert one.claim_transferred().held
    assert not one.claim_noticed().held
    assert "VERDICT: all 2 held" in verdict([one.claim_equal(exact), one.claim_transferred()])
    assert table([one]).splitlines()[-1].split() == [
        *("test", "1", "1", "3", "384", "2.00", "0", "1/1")
    ]


@pytest.mark.parametrize("got", [completion(6, -1.0), completion(5, -1.0001)])
def test_any_difference_breaks_an_exact_claim(got: Completion) -> None:
    exact = Noise((True,), 0.0)
    one = one_pass(got, exact)
    claim = one.claim_equal(exact)
    assert not claim.held
    assert one.claim_noticed().held
    assert "FAIL" in verdict([claim])
    assert "1 of 1 did NOT hold" in verdict([claim])


def test_the_tolerance_is_a_small_multiple_of_the_measured_noise() -> None:
    noise = Noise.between([completion(5, -1.0)], [completion(5, -1.001)])
    assert one_pass(completion(5, -1.0 + 1.9e-3), noise).claim_equal(noise).held
    assert not one_pass(completion(5, -1.0 + 2.1e-3), noise).claim_equal(noise).held
    assert NOISE_MARGIN == 2.0


def test_where_the_single_server_disagrees_with_itself_only_logprobs_count() -> None:
    near = Completion((1, 2), (6,), ({5: -1.0, 6: -1.0, 99: -3.0},), "length")
    noise = Noise((False,), 1.0)
    assert one_pass(near, noise).claim_equal(noise).held
    assert not one_pass(near, Noise((True,), 1.0)).claim_equal(noise).held
    assert not one_pass(completion(6, -9.0), noise).claim_equal(noise).held


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(num_blocks=3, num_bytes=383, num_reads=1, seconds=0.0, num_failures=0),
        Traffic(num_blocks=2, num_bytes=384, num_reads=1, seconds=0.0, num_failures=0),
        Traffic(num_blocks=3, num_bytes=384, num_reads=1, seconds=0.0, num_failures=1),
        Traffic(num_blocks=0, num_bytes=0, num_reads=0, seconds=0.0, num_failures=0),
    ],
)
def test_missing_or_failed_transfers_break_the_claim(traffic: Traffic) -> None:
    assert not one_pass(completion(5, -1.0), Noise((True,), 0.0), traffic).claim_transferred().held


def likely(first: tuple[int, float], second: tuple[int, float]) -> Completion:
    """An answer of one token, ``first``, with the logprobs of two."""
    return Completion((1, 2), (first[0],), (dict([first, second]),), "length")


@pytest.mark.parametrize(
    ("got", "held"),
    [
        (likely((6, -1.0), (5, -1.004)), True),
        (likely((6, -1.0), (7, -3.0)), False),
        (likely((7, -1.0), (5, -1.0)), False),
    ],
)
def test_between_sizes_a_token_may_be_another_only_where_both_are_as_likely(
    got: Completion, held: bool
) -> None:
    own = likely((5, -1.0), (6, -1.004))
    noise = Noise.of_rounding([own], [likely((5, -1.003), (6, -1.004))])
    [difference] = noise.compare_all([own], [got])
    assert difference.equal == held
    [exact] = Noise.none(1).compare_all([own], [got])
    assert not exact.equal


def test_a_token_that_was_less_likely_is_wrong_even_if_its_logprobs_are_near() -> None:
    own, got = likely((5, -1.0), (6, -1.1)), likely((6, -1.05), (5, -1.05))
    noise = Noise.of_rounding([own], [likely((5, -1.03), (6, -1.1))])
    assert got.token_ids != own.token_ids
    [difference] = noise.compare_all([own], [got])
    assert difference.max_logprob <= noise.tolerance
    assert not difference.equal


@pytest.mark.parametrize("num_bytes", [0, 383, 385])
def test_other_bytes_than_expected_break_the_claim_without_blocks(num_bytes: int) -> None:
    exact, expected = Noise.none(1), Expected(384, source="as before")
    good = one_pass(completion(5, -1.0), exact, GOOD, expected).claim_transferred()
    assert good.held
    assert "as before" in good.detail
    other = Traffic(num_blocks=9, num_bytes=num_bytes, num_reads=1, seconds=0.0, num_failures=0)
    assert not one_pass(completion(5, -1.0), exact, other, expected).claim_transferred().held


def parsed(*arguments: str) -> argparse.Namespace:
    return demo.parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "name", "sizes"),
    [
        ([], "EqualTpScenario", (1, 1)),
        (["--tp", "2"], "EqualTpScenario", (2, 2)),
        (["--tp", "2", "--d-tp", "1"], "SplitScenario", (2, 1)),
        (["--p-tp", "1", "--d-tp", "2"], "SplitScenario", (1, 2)),
        (["--model", "llama1", "--tp", "2"], "EqualTpScenario", (2, 2)),
        (["--model", "granite1"], "SplitScenario", (1, 1)),
        (["--model", "swa", "--tp", "2"], "SplitScenario", (2, 2)),
    ],
)
def test_the_course_suits_the_model_and_the_sizes(
    arguments: list[str], name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    scenario = demo.choose_scenario(parsed(*arguments), tmp_path)
    assert type(scenario).__name__ == name
    assert (scenario.options.prefill_tp, scenario.options.decode_tp) == sizes


@pytest.mark.parametrize("arguments", [["--model", "gpt5"], ["--tp", "5"], ["--p-tp", "0"]])
def test_unknown_models_and_sizes_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert "invalid choice" in capsys.readouterr().err
