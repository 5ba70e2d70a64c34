"""The comparison that proves parity finds every kind of difference, and only those."""

from collections.abc import Mapping

import pytest

from tests.kit.parity import Completion, compare, lines_of, logprob_difference
from vllm_commext.errors import ProtocolError

BLOCK = 32


def completion(token_ids: tuple[int, ...], *logprobs: Mapping[int, float]) -> Completion:
    tops = logprobs or tuple({token: -1.0, 99: -2.0} for token in token_ids)
    return Completion((1, 2, 3), token_ids, tops, "length")


def test_equal_completions_have_no_difference() -> None:
    found = compare(completion((4, 5, 6)), completion((4, 5, 6)))
    assert found.equal
    assert found.tokens_equal
    assert found.position is None
    assert found.max_logprob == 0.0


def test_the_first_different_token_is_found_and_later_positions_are_not_compared() -> None:
    expected = completion((4, 5, 6), {4: -1.0}, {5: -1.0, 7: -1.5}, {6: -0.5})
    got = completion((4, 7, 6), {4: -1.0}, {5: -1.5, 7: -1.25}, {6: -9.0})
    found = compare(expected, got)
    assert not found.equal
    assert not found.tokens_equal
    assert found.position == 1
    assert found.max_logprob == 0.5


@pytest.mark.parametrize(("atol", "position"), [(0.0, 1), (0.2, 1), (0.25, None)])
def test_a_logprob_may_differ_by_the_tolerance(atol: float, position: int | None) -> None:
    expected = completion((4, 5), {4: -1.0}, {5: -1.0})
    got = completion((4, 5), {4: -1.0}, {5: -1.25})
    assert compare(expected, got, atol).position == position


@pytest.mark.parametrize("shorter", [(4,), ()])
def test_a_missing_end_is_a_difference(shorter: tuple[int, ...]) -> None:
    whole, part = completion((4, 5)), completion(shorter)
    assert compare(whole, part).position == len(shorter)
    assert compare(part, whole).position == len(shorter)


def test_a_token_that_only_one_list_has_counts_beyond_the_other_lists_end() -> None:
    one = {1: -1.0, 2: -2.0, 3: -2.5}
    assert logprob_difference(one, {1: -1.0, 2: -2.0, 4: -2.25}) == 0.25
    assert logprob_difference(one, {1: -1.0, 2: -2.0, 4: -2.5}) == 0.0
    assert logprob_difference({1: -1.0}, {2: -1.5}) == 0.5


def test_an_answer_with_fewer_logprobs_than_tokens_is_refused() -> None:
    from tests.kit import parity

    choice = {"token_ids": [1, 2], "finish_reason": "length", "logprobs": {"top_logprobs": [{}]}}
    with pytest.raises(ProtocolError, match="1 for 2 tokens"):
        parity._completion((1,), [choice])


def test_only_a_line_feed_ends_a_line_of_a_stream() -> None:
    pieces = ["data: a\u0085b", "\u2028c\nda", "ta: d\r\n", "\n"]
    assert list(lines_of(pieces)) == ["data: a\u0085b\u2028c", "data: d\r", "", ""]
