"""What is learned of engines' speed, and of answers' lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.proxy.engine_speed import MOST_BINNED, LeastSquares, Lengths, bins


def test_one_stall_does_not_make_a_slow_engine() -> None:
    model = LeastSquares()
    for _ in range(30):
        model.add((1.0, 0.0, 0.0), 0.01)
    model.add((1.0, 0.0, 0.0), 60.0)
    assert model.predict((1.0, 0.0, 0.0)) < 0.012


def test_lengths_tell_how_many_answers_are_longer() -> None:
    lengths = Lengths()
    assert set(lengths.longer.values()) == {1.0}
    for tokens in (10, 100, 1000, 10) * 25:
        lengths.add(tokens)
    shares = [lengths.longer[bins[tokens]] for tokens in (1, 50, 500, 5000)]
    assert shares == pytest.approx([1.0, 0.5, 0.25, 0.0], abs=0.05)
    assert lengths.mean == pytest.approx(280, rel=0.1)
    for tokens in (20, 2000) * 30_000:  # so many that weights begin anew
        lengths.add(tokens)
    shares = [lengths.longer[bins[tokens]] for tokens in (1, 200, 5000)]
    assert shares == pytest.approx([1.0, 0.5, 0.0], abs=0.05)
    assert lengths.mean == pytest.approx(1010, rel=0.05)


@given(st.lists(st.integers(1, 2 * MOST_BINNED), min_size=1, max_size=30))
def test_shares_are_those_of_all_longer_answers(answers: list[int]) -> None:
    """Each bin's, added up anew; asked for between the answers, too."""
    lengths = Lengths()
    for tokens in answers:
        lengths.add(tokens)
        counts, longer = lengths._counts, lengths.longer
        for idx, own in enumerate(counts):
            more = sum(counts[idx:]) - own / 2
            assert longer[idx] == pytest.approx(more / sum(counts))
        assert longer is lengths.longer


def test_an_answer_may_be_a_third_longer_or_shorter_though_all_were_alike() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.add(256)
    shares = [lengths.longer[bins[tokens]] for tokens in (160, 200, 256, 320, 400)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[2], shares[4]) == pytest.approx((1.0, 0.5, 0.0))
    assert 0.7 < shares[1] < 0.98
    assert lengths.mean == pytest.approx(256)
    for tokens in (1, MOST_BINNED) * 200:
        lengths.add(tokens)
    assert lengths.longer[bins[256]] == pytest.approx(0.5, abs=0.1)
