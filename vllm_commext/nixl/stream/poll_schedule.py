"""When a row is looked at again: around the time at which the prompt's next chunk is likely to be
computed often, before and long after it seldom.

A chunk is expected after as long as the last one took, in proportion to its tokens.  Pure; times in
seconds.
"""

from dataclasses import dataclass

FINEST_SECONDS = 1e-3
"""Between two looks at one row, where a chunk is expected within ``FINE`` times as long."""
FINE = 100
LONGEST_SECONDS = 0.1
"""Between any two looks, so that an abort or a preemption is noticed."""
EARLY, LATE = 0.9, 1.5
"""Times the expected time: from when to when looks follow each other as fast as they may."""
FIRST = 12
"""Looks for the first chunk, of which nothing is known, are this part of the time apart that has
passed."""


def wait_seconds(passed: float, expected: float | None) -> float:
    """Until the next look.

    Args:
        passed: since the last chunk was seen, or since the first look.
        expected: from one chunk to the next; None where nothing is known.
    """
    if expected is None:
        return min(max(passed / FIRST, FINEST_SECONDS), LONGEST_SECONDS)
    finest = max(expected / FINE, FINEST_SECONDS)
    if passed < EARLY * expected:
        wait = max((EARLY * expected - passed) / 2, finest)
    elif passed < LATE * expected:
        wait = finest
    else:
        wait = max(passed / FIRST, finest)
    return min(wait, LONGEST_SECONDS)


@dataclass
class PollSchedule:
    """How fast one prompt is computed, as far as its row has shown.

    Attributes:
        since: when the last chunk was seen, or the first look.
        num_tokens: tokens that were computed then.
        chunk_tokens: of the last chunk, 0 before there is one.
        chunk_seconds: what it took.
    """

    since: float
    num_tokens: int = 0
    chunk_tokens: int = 0
    chunk_seconds: float = 0.0

    def note(self, num_tokens: int, now: float) -> None:
        """A look has found so many tokens computed."""
        if num_tokens > self.num_tokens:
            self.chunk_tokens = num_tokens - self.num_tokens
            self.chunk_seconds = now - self.since
            self.num_tokens, self.since = num_tokens, now

    def next_tokens(self, num_tokens: int) -> int:
        """Tokens of a prompt of so many that the next chunk is likely to have, at least one."""
        return max(min(self.chunk_tokens, num_tokens - self.num_tokens), 1)

    def wait(self, num_tokens: int, now: float) -> float:
        """Until the row of a prompt of so many tokens is looked at again."""
        expected = None
        if self.chunk_tokens:
            expected = self.chunk_seconds * self.next_tokens(num_tokens) / self.chunk_tokens
        return wait_seconds(now - self.since, expected)
