"""What an answer is worth, and what a recovery is worth.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.kit.parity import Completion, compare, near_enough

RIGHT = "right"
WRONG = "wrong"
ERROR = "error"
LATE = "late"

NOISE_NATS = 0.02
"""How far a logprob may be from its reference: batches of other sizes round otherwise.  Blocks of
another prompt move it by whole nats."""
MAX_ATTEMPTS = 2
MAX_RECOVERY_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """One request's end: a ``completion`` with status 200, or an ``error``."""

    seconds: float
    completion: Completion | None
    error: str = ""


@dataclass(frozen=True)
class Recovery:
    """The way back to service after a fault: requests until the first good one that was read from
    the prefill engine, seconds from the peer's return to its end, or the last answer instead of
    it."""

    attempts: int
    seconds: float
    succeeded: bool
    why: str = ""

    @property
    def is_in_time(self) -> bool:
        return (
            self.succeeded
            and self.attempts <= MAX_ATTEMPTS
            and self.seconds <= MAX_RECOVERY_SECONDS
        )


def first(completion: Completion, num_tokens: int) -> Completion:
    """The beginning of a right answer, which is what a shorter one has to be."""
    ids, logprobs = completion.token_ids[:num_tokens], completion.logprobs[:num_tokens]
    return replace(completion, token_ids=ids, logprobs=logprobs)


def judge(reference: Completion, answer: Answer, bound_seconds: float) -> str:
    """``RIGHT``, ``WRONG``, ``ERROR`` for an answer that says so, ``LATE`` for any beyond its
    bound; a wrong one is wrong however late it is."""
    completion = answer.completion
    right = completion is not None and is_right(reference, completion)
    return verdict(right, answer.error, answer.seconds, bound_seconds)


def verdict(right: bool, error: str, seconds: float, bound_seconds: float) -> str:
    """As ``judge``, of an answer that was compared with its reference where it is no *error*."""
    if not right and not error:
        return WRONG
    if seconds > bound_seconds:
        return LATE
    return ERROR if error else RIGHT


def is_right(reference: Completion, got: Completion) -> bool:
    """Equal tokens, or another of two equally likely ones; equal logprobs, if any, up to there."""
    if len(got.token_ids) != len(reference.token_ids):
        return False
    distance = compare(reference, got, NOISE_NATS).max_logprob if got.logprobs else 0.0
    return distance <= NOISE_NATS and near_enough(reference, got, NOISE_NATS)
