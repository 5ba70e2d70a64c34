"""How much of prompts a step computes beside running answers, against an engine whose step times
are known."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.step_budget import (
    MARGIN,
    MIN_TOKENS,
    UNKNOWN_TOKENS,
    Answer,
    Prompt,
    StepBudget,
)

ALONE, EACH, MIXED, TOKEN = 0.006, 40e-6, 0.002, 25e-6
ROOM = 8192
LEARNING = 40


def seconds_of(num_answers: int, prompt_tokens: int) -> float:
    mixed = MIXED + TOKEN * prompt_tokens if prompt_tokens else 0.0
    return ALONE + EACH * num_answers + mixed


@dataclass
class Engine:
    """Prompts always wait; answers run from the first step. computed: tokens of prompts."""

    num_answers: int
    limit: float
    is_async: bool
    now: float = 100.0
    computed: int = 0
    budget: StepBudget = field(default_factory=StepBudget)

    def run(self, num_steps: int) -> None:
        """Steps; each answer keeps its limit after each of them, once step times are known."""
        began, under_way = self.now, None
        for num in range(1, num_steps + 1):
            expected = None if under_way is None else self.budget.seconds(under_way)
            done = num if under_way is None else num - 1
            answers = [Answer(began, done, 10_000, self.limit)] * self.num_answers
            piece = self.budget.prompt_tokens(self.now, answers, [], expected)
            step = ROOM if piece is None else min(piece, ROOM)
            self.computed += step
            ending, under_way = (under_way, step) if self.is_async else (step, None)
            if ending is not None:
                seconds = seconds_of(self.num_answers, ending)
                self.now += seconds
                self.budget.note_step(ending, seconds)
                mean = (self.now - began) / num
                assert num < LEARNING or mean <= self.limit


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("num_answers", "limit"), [(1, 0.010), (32, 0.012), (32, 0.025), (64, 0.05)]
)
def test_answers_keep_their_limit_and_prompts_get_the_rest(
    num_answers: int, limit: float, is_async: bool
) -> None:
    engine = Engine(num_answers, limit, is_async)
    began = engine.now
    engine.run(400)
    mean = (engine.now - began) / (399 if is_async else 400)
    assert 0.9 * limit < mean <= limit
    possible = 400 * (MARGIN * limit - ALONE - EACH * num_answers - MIXED) / TOKEN
    assert engine.computed >= 0.9 * possible


@pytest.mark.parametrize(
    ("prompts", "tokens_a_second"),
    [
        ([Prompt(6000, 1.0)], 6000),
        ([Prompt(9000, -1.0), Prompt(3000, 1.0)], 12000),
        ([Prompt(8000, 0.5), Prompt(100, 9.0)], 16000),
    ],
)
def test_prompts_keep_their_own_limit_first(prompts: list[Prompt], tokens_a_second: int) -> None:
    budget = StepBudget()
    for prompt_tokens in (0, 100, 200, 300, 400) * 20:
        budget.note_step(prompt_tokens, ALONE + TOKEN * prompt_tokens)
    answer = Answer(99.9, 10, 1000, 0.0105)  # has less than a step
    piece = budget.prompt_tokens(100.0, [answer], prompts, None)
    assert piece is not None
    assert piece / (ALONE + TOKEN * piece) == pytest.approx(tokens_a_second, rel=0.03)


def test_prompts_that_need_all_of_the_engine_are_whole() -> None:
    engine = Engine(4, 0.02, is_async=False)
    engine.run(LEARNING)
    answer = Answer(engine.now, 1, 1000, 0.02)
    assert engine.budget.prompt_tokens(engine.now, [answer], [Prompt(90_000, 1.0)], None) is None


def test_what_an_answer_has_saved_is_spent_on_a_whole_prompt() -> None:
    engine = Engine(4, 0.02, is_async=False)
    engine.run(20)
    saved = Answer(engine.now - 100 * 0.007, 101, 1000, 0.02)
    piece = engine.budget.prompt_tokens(engine.now, [saved], [], None)
    assert piece is not None
    assert piece > ROOM


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], None),
        # Slower than its limit even alone: nothing that prompts leave would help.
        ([Answer(99.0, 10, 1000, 0.004)], None),
        # Late, and with too few tokens left to make up for it.
        ([Answer(99.0, 10, 3, 0.010)], None),
        # Late, but a long answer makes up for it.
        ([Answer(99.9, 9, 10_000, 0.010)], MIN_TOKENS),
        # The one that has least decides.
        ([Answer(99.0, 500, 100, 0.010), Answer(99.9, 9, 10_000, 0.010)], MIN_TOKENS),
    ],
)
def test_which_answers_count(answers: list[Answer], expected: int | None) -> None:
    budget = StepBudget()
    for prompt_tokens in (0, 0, 0, 100, 200, 300, 400):
        budget.note_step(prompt_tokens, seconds_of(4, prompt_tokens))
    assert budget.prompt_tokens(100.0, answers, [], None) == expected


def test_pieces_are_small_before_anything_is_known() -> None:
    answer = Answer(100.0, 1, 100, 0.02)
    assert StepBudget().prompt_tokens(100.0, [answer], [], None) == UNKNOWN_TOKENS


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(1, 1000), st.integers(0, 1000), st.floats(1e-4, 9)),
        max_size=5,
    ),
    st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 10)), max_size=9),
    st.none() | st.floats(0, 10),
)
def test_a_piece_is_never_below_the_least(
    answers: list[tuple[float, int, int, float]],
    steps: list[tuple[int, float]],
    under_way: float | None,
) -> None:
    budget = StepBudget()
    for step in steps:
        budget.note_step(*step)
    piece = budget.prompt_tokens(10.0, [Answer(*one) for one in answers], [], under_way)
    assert piece is None or piece >= MIN_TOKENS
