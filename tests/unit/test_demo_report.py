"""The demo's claims fail when they should, and it refuses what it has no model or size for. Metrics
that are absent do not read as zero."""

from pathlib import Path

import pytest

from tests.kit.demo import __main__ as demo
from tests.kit.demo.report import Expected, Noise, Pass, table, verdict
from tests.kit.metrics import parse
from tests.kit.parity import Completion
from vllm_commext.errors import ConfigError

NEEDED = Expected(384, "as before")
EXACT = Noise()


def completion(token: int, logprob: float) -> Completion:
    return Completion((1, 2), (token,), ({token: logprob, 99: -3.0},), "length")


def one_pass(got: Completion, noise: Noise, num_bytes: int = 384, failures: int = 0) -> Pass:
    counts = {"bytes_total": num_bytes, "failures_total": failures}
    counts |= {"transfer_seconds_sum": 0.002, "transfer_seconds_count": 1}
    page = "".join(f"vllm:commext_nixl_{name} {count}\n" for name, count in counts.items())
    difference = noise.compare(completion(5, -1.0), got)
    return Pass("test", [got], [difference], parse(page), NEEDED)


def test_an_absent_metric_is_an_error_that_names_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"commext_nixl_byte_total.*commext_nixl_bytes_total"):
        parse("vllm:commext_nixl_bytes_total 1\n").total("vllm:commext_nixl_byte_total")


def test_equal_answers_and_all_bytes_hold() -> None:
    one = one_pass(completion(5, -1.0), EXACT)
    assert one.claim_equal(EXACT).held
    assert one.claim_transferred().held
    assert "as before" in one.claim_transferred().detail
    assert not one.claim_noticed().held
    assert "VERDICT: all 2 held" in verdict([one.claim_equal(EXACT), one.claim_transferred()])
    assert table([one]).splitlines()[-1].split() == ["test", "1", "1", "384", "2.00", "0", "1/1"]


@pytest.mark.parametrize("got", [completion(6, -1.0), completion(5, -1.0001)])
def test_any_difference_breaks_an_exact_claim(got: Completion) -> None:
    one = one_pass(got, EXACT)
    claim = one.claim_equal(EXACT)
    assert not claim.held
    assert one.claim_noticed().held
    assert "1 of 1 did NOT hold" in verdict([claim])


def test_the_tolerance_is_a_small_multiple_of_the_measured_noise() -> None:
    noise = Noise.of_rounding([completion(5, -1.0)], [completion(5, -1.001)])
    assert one_pass(completion(5, -1.0 + 1.9e-3), noise).claim_equal(noise).held
    assert not one_pass(completion(5, -1.0 + 2.1e-3), noise).claim_equal(noise).held


@pytest.mark.parametrize(("num_bytes", "failures"), [(0, 0), (383, 0), (385, 0), (384, 1)])
def test_missing_or_failed_transfers_break_the_claim(num_bytes: int, failures: int) -> None:
    one = one_pass(completion(5, -1.0), EXACT, num_bytes, failures)
    assert not one.claim_transferred().held


def likely(first: tuple[int, float], second: tuple[int, float]) -> Completion:
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
    assert noise.compare(own, got).equal == held
    assert not EXACT.compare(own, got).equal


def test_a_token_that_was_less_likely_is_wrong_even_if_its_logprobs_are_near() -> None:
    own, got = likely((5, -1.0), (6, -1.1)), likely((6, -1.05), (5, -1.05))
    noise = Noise.of_rounding([own], [likely((5, -1.03), (6, -1.1))])
    difference = noise.compare(own, got)
    assert difference.max_logprob <= noise.tolerance
    assert not difference.equal


def test_sizes_that_the_model_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected .* for smollm2"):
        demo.choose_scenario(
            demo.parser().parse_args(["--model", "smollm2", "--p-tp", "2"]), tmp_path
        )
