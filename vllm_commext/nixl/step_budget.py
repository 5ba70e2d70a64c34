"""How much of prompts an engine's step may compute beside the answers that it gives. Pure: times
are arguments.

An answer's time per output token is a mean over the answer, so that what it has been faster than
its limit is time that a prompt may take. A step is therefore as long as every answer keeps its
limit with it, wherever the answer ends: whole prompts where no answer is near its limit, small
pieces where one is, and larger ones where a prompt's own limit could not be kept otherwise. How
long steps take is learned from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.97
"""Share of an answer's limit that is used up on purpose."""
FIRST_TOKEN_MARGIN = 0.9
"""Share of a prompt's limit within which it is computed."""
_FULL = 0.95
"""Share of an engine's time for prompts from which on they are computed whole."""
MIN_TOKENS = 32
"""Of prompts, in any step: they go on whatever the answers have left."""
UNKNOWN_TOKENS = 256
"""Of prompts, in a step whose time is not known yet."""
_KEPT = 0.9
"""Of what was known before, after one step more."""


@dataclass(frozen=True)
class Answer:
    """A running answer with a limit.

    Attributes:
        first_at: when its first token was there.
        tokens: that it has, at least 1.
        left: tokens that it may have still, at most.
        limit: seconds to each token after the first, as a mean over the answer.
    """

    first_at: float
    tokens: int
    left: int
    limit: float


@dataclass(frozen=True)
class Prompt:
    """A prompt that is computed or waits for it. tokens: of it that are left. seconds: until its
    limit, below zero where that is past."""

    tokens: int
    seconds: float


class StepBudget:
    """One engine's steps, as the latest ones were."""

    def __init__(self) -> None:
        self._alone = 0.0
        self._extra = self._tokens = 0.0

    def note_step(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took *seconds*."""
        if prompt_tokens:
            # Per token at pieces of the latest size: what a piece costs besides is in it, and a
            # piece that is sized by it comes nearer to what fits with every step.
            self._extra = _KEPT * self._extra + max(0.0, seconds - self._alone)
            self._tokens = _KEPT * self._tokens + prompt_tokens
        elif self._alone:
            self._alone = _KEPT * self._alone + (1.0 - _KEPT) * seconds
        else:
            self._alone = seconds

    def seconds(self, prompt_tokens: int) -> float:
        """Expected time of a step, 0 where it is unknown."""
        return self._alone + (prompt_tokens * self._extra / self._tokens if self._tokens else 0.0)

    def prompt_tokens(
        self,
        now: float,
        answers: Sequence[Answer],
        prompts: Sequence[Prompt],
        under_way: float | None,
    ) -> int | None:
        """Tokens of prompts for the next step, None for no limit.

        Args:
            now: the time.
            answers: those with a limit.
            prompts: those with a limit, in the order in which they are computed.
            under_way: seconds that a step will take which is under way before it; None without.
        """
        kept = [one for one in answers if not _is_lost(one, now, under_way, self._alone)]
        if not kept:
            return None
        if not self._extra:
            return UNKNOWN_TOKENS
        spare = min(_seconds_left(one, now, under_way) for one in kept) - self._alone
        token = self._extra / self._tokens
        needed = _tokens_a_second(prompts)
        if needed * token >= _FULL:
            return None
        in_time = needed * self._alone / (1.0 - needed * token)
        return max(MIN_TOKENS, int(in_time), int(spare / token))


def _tokens_a_second(prompts: Sequence[Prompt]) -> float:
    """Speed at which each prompt whose limit is not past is computed in time, those before it
    too."""
    tokens, needed = 0, 0.0
    for prompt in prompts:
        tokens += prompt.tokens
        if prompt.seconds > 0.0:
            needed = max(needed, tokens / prompt.seconds)
    return needed


def _seconds_left(answer: Answer, now: float, under_way: float | None) -> float:
    """What the next step may take, so that the answer keeps its limit with that step's token."""
    gaps = answer.tokens if under_way is None else answer.tokens + 1
    return MARGIN * answer.limit * gaps - (now - answer.first_at) - (under_way or 0.0)


def _is_lost(answer: Answer, now: float, under_way: float | None, alone: float) -> bool:
    """Whether the answer misses its limit, were it to go on beside no prompt for as many tokens
    again as it has, or is allowed."""
    gained = max(0.0, answer.limit - alone) * min(answer.left, answer.tokens)
    return _seconds_left(answer, now, under_way) + gained < min(alone, answer.limit)
