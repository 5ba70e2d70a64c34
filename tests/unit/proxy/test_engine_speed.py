"""What is learned of engines' speed, and of answers' lengths."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.proxy.policy.answer_lengths import MOST_BINNED, Lengths
from vllm_commext.proxy.policy.engine_speed import EngineSpeed, LeastSquares, SharedSpeed, area_of


def test_one_stall_does_not_make_a_slow_engine() -> None:
    model = LeastSquares()
    for _ in range(30):
        model.add((1.0, 0.0, 0.0), 0.01)
    model.add((1.0, 0.0, 0.0), 60.0)
    assert model.predict((1.0, 0.0, 0.0)) < 0.012


@pytest.mark.parametrize(("slowness", "error"), [(0.5, 0.4), (1.0, 0.15), (2.0, 0.4)])
def test_an_engine_that_computes_short_prompts_alone_knows_how_long_others_take(
    slowness: float, error: float
) -> None:
    """A step with prompts takes 22 ms at least, so short ones seem to take more a token."""
    dice, shared = random.Random(1), SharedSpeed(0.01)
    engines = [(EngineSpeed(shared), one) for one in (1.0, 1.0, slowness)]

    def seconds(tokens: int) -> float:
        return max(0.022, 2e-5 * tokens + 1e-9 * tokens**2) * dice.uniform(0.9, 1.1)

    for tokens in [500, 500, 1000, 500, 12000] * 40:
        for speed, slower in engines:
            tokens = 500 if speed is engines[-1][0] else tokens
            speed.note_prefill(tokens, area_of(tokens, 0), slower * seconds(tokens))
    for tokens, expected in ((500, 0.022), (12000, 0.384)):
        found = engines[-1][0].prefill_seconds(tokens, 0)
        assert found == pytest.approx(slowness * expected, rel=error)


def longer(lengths: Lengths, tokens: int) -> float:
    """Share of answers that have *tokens* at least."""
    return 1.0 - lengths.ended(tokens, 0)


def test_lengths_tell_how_many_answers_are_longer() -> None:
    lengths = Lengths()
    unknown = [longer(lengths, tokens) for tokens in (2, 50, 1000)]
    assert unknown == pytest.approx([1.0, 0.8, 0.0], abs=0.05)
    for tokens in (10, 100, 1000, 10) * 25:
        lengths.add(tokens)
    shares = [longer(lengths, tokens) for tokens in (1, 50, 500, 5000)]
    assert shares == pytest.approx([1.0, 0.5, 0.25, 0.0], abs=0.05)
    assert lengths.mean == pytest.approx(280, rel=0.1)
    for tokens in (20, 2000) * 30_000:  # so many that weights begin anew
        lengths.add(tokens)
    shares = [longer(lengths, tokens) for tokens in (1, 200, 5000)]
    assert shares == pytest.approx([1.0, 0.5, 0.0], abs=0.05)
    assert lengths.mean == pytest.approx(1010, rel=0.05)


within = st.integers(1, MOST_BINNED - 1)


@given(
    st.lists(st.integers(1, 2 * MOST_BINNED), min_size=1, max_size=30),
    st.lists(st.tuples(within, within), min_size=1, max_size=9),
)
def test_shares_are_as_if_nothing_had_been_asked_between_the_answers(
    answers: list[int], asked: list[tuple[int, int]]
) -> None:
    lengths, fresh, shares = Lengths(), Lengths(), list[float]()
    for tokens in answers:
        fresh.add(tokens)
        lengths.add(tokens)
        shares = [lengths.ended(needed, had) for had, needed in asked]
    assert shares == pytest.approx([fresh.ended(needed, had) for had, needed in asked])


def test_an_answer_may_be_a_third_longer_or_shorter_though_all_were_alike() -> None:
    lengths = Lengths(())
    for _ in range(200):
        lengths.add(256)
    shares = [longer(lengths, tokens) for tokens in (160, 200, 256, 320, 400)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[2], shares[4]) == pytest.approx((1.0, 0.5, 0.0))
    assert 0.7 < shares[1] < 0.98
    assert lengths.mean == pytest.approx(256)
    for tokens in (1, MOST_BINNED) * 200:
        lengths.add(tokens)
    assert longer(lengths, 256) == pytest.approx(0.55, abs=0.1)
