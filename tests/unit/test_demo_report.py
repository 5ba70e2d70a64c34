"""The comparison that proves parity finds every kind of difference, and the demo's claims fail when
they should. Metrics that are absent do not read as zero."""

from collections.abc import Mapping

import pytest

from tests.kit.demo.report import Expected, Noise, Pass, table, verdict
from tests.kit.metrics import parse
from tests.kit.parity import Completion, compare, logprob_difference
from vllm_commext.errors import ConfigError

NEEDED = Expected(384, "as before")
EXACT = Noise()


def several(token_ids: tuple[int, ...], *logprobs: Mapping[int, float]) -> Completion:
    tops = logprobs or tuple({token: -1.0, 99: -2.0} for token in token_ids)
    return Completion((1, 2, 3), token_ids, tops, "length")


def test_the_first_different_token_is_found_and_later_positions_are_not_compared() -> None:
    expected = several((4, 5, 6), {4: -1.0}, {5: -1.0, 7: -1.5}, {6: -0.5})
    found = compare(expected, several((4, 7, 6), {4: -1.0}, {5: -1.5, 7: -1.25}, {6: -9.0}))
    assert (found.equal, found.tokens_equal, found.position) == (False, False, 1)
    assert found.max_logprob == 0.5


@pytest.mark.parametrize(("atol", "position"), [(0.0, 1), (0.2, 1), (0.25, None)])
def test_a_logprob_may_differ_by_the_tolerance(atol: float, position: int | None) -> None:
    expected = several((4, 5), {4: -1.0}, {5: -1.0})
    assert compare(expected, several((4, 5), {4: -1.0}, {5: -1.25}), atol).position == position


@pytest.mark.parametrize("shorter", [(4,), ()])
def test_a_missing_end_is_a_difference(shorter: tuple[int, ...]) -> None:
    whole, part = several((4, 5)), several(shorter)
    assert compare(whole, part).position == compare(part, whole).position == len(shorter)


def test_a_token_that_only_one_list_has_counts_beyond_the_other_lists_end() -> None:
    one = {1: -1.0, 2: -2.0, 3: -2.5}
    assert logprob_difference(one, {1: -1.0, 2: -2.0, 4: -2.25}) == 0.25
    assert logprob_difference(one, {1: -1.0, 2: -2.0, 4: -2.5}) == 0.0
    assert logprob_difference({1: -1.0}, {2: -1.5}) == 0.5


def completion(token: int, logprob: float) -> Completion:
    return several((token,), {token: logprob, 99: -3.0})


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
