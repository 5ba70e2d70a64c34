"""The comparison that proves parity finds every kind of difference. Metrics that are absent do not
read as zero."""

from collections.abc import Mapping

import pytest

from tests.kit.metrics import parse
from tests.kit.parity import Completion, compare, logprob_difference
from vllm_commext.errors import ConfigError


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


def test_an_absent_metric_is_an_error_that_names_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"commext_nixl_byte_total.*commext_nixl_bytes_total"):
        parse("vllm:commext_nixl_bytes_total 1\n").total("vllm:commext_nixl_byte_total")
