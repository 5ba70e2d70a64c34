"""What the demo found: one row a pass, one line a claim, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.kit.metrics import Metrics
from tests.kit.parity import Completion, Difference, compare

PREFIX = "vllm:commext_nixl_"
BYTES = f"{PREFIX}bytes_total"
# The largest of a few hundred differences is itself a matter of chance, so twice the largest that
# the single server shows against itself is allowed. Where it shows none, none is allowed.
NOISE_MARGIN = 2.0


@dataclass(frozen=True)
class Noise:
    """How far the single server is from itself.

    ``max_logprob``: largest difference of a logprob, nats.
    ``allows_ties``: another token is as good where the single server finds it as likely, within
    the tolerance.
    """

    max_logprob: float = 0.0
    allows_ties: bool = False

    @classmethod
    def of_rounding(cls, one: Sequence[Completion], other: Sequence[Completion]) -> Noise:
        found = max(compare(*pair).max_logprob for pair in zip(one, other, strict=True))
        return cls(found, found > 0)

    @property
    def tolerance(self) -> float:
        """Nats by which another server's logprobs may differ."""
        return NOISE_MARGIN * self.max_logprob

    def at_least(self, other: Noise) -> Noise:
        return max(self, other, key=lambda noise: noise.max_logprob)

    def compare(self, expected: Completion, got: Completion) -> Difference:
        found = compare(expected, got, self.tolerance)
        excused = self.allows_ties and _first_is_tie(expected, got, self.tolerance)
        if excused and found.max_logprob <= self.tolerance:
            return replace(found, position=None)
        return found


def _first_is_tie(expected: Completion, got: Completion, tolerance: float) -> bool:
    tokens = zip(expected.token_ids, got.token_ids, expected.logprobs, strict=False)
    for one, other, likely in tokens:
        if one != other:
            return likely[one] - likely.get(other, -math.inf) <= tolerance
    return False


@dataclass(frozen=True)
class Expected:
    """How many bytes a pass must make the decode engine read, and how that is known, where it was
    not computed beforehand."""

    num_bytes: int
    source: str = ""


@dataclass(frozen=True)
class Pass:
    """Requests sent in one way, how they compare with the single server's answers, and what they
    added to the decode engine's metrics."""

    name: str
    got: Sequence[Completion]
    differences: Sequence[Difference]
    added: Metrics
    expected: Expected

    @property
    def num_equal(self) -> int:
        return sum(difference.equal for difference in self.differences)

    @property
    def max_logprob(self) -> float:
        return max(difference.max_logprob for difference in self.differences)

    @property
    def num_bytes(self) -> int:
        return int(self.added.total(BYTES))

    def claim_equal(self, noise: Noise) -> Claim:
        first = next((place for place, one in enumerate(self.differences) if not one.equal), None)
        within = f"within {noise.tolerance:.2g} nats" if noise.tolerance else "exactly"
        detail = f"{self.num_equal} of {len(self.got)}, logprobs {within}"
        changed = sum(not one.tokens_equal for one in self.differences if one.equal)
        if changed:
            detail += f"; {changed} took another token that was as likely"
        if first is not None:
            detail += (
                f"; first different: request {first}, a prompt of {len(self.got[first].prompt)} "
                f"tokens, {self.differences[first]}"
            )
        return Claim(f"{self.name}: answers equal the single server's", first is None, detail)

    def claim_noticed(self) -> Claim:
        num_noticed = len(self.got) - self.num_equal
        detail = f"{num_noticed} of {len(self.got)} differ, by up to {self.max_logprob:.2g} nats"
        return Claim(f"{self.name}: the change is noticed", self.num_equal == 0, detail)

    def claim_transferred(self) -> Claim:
        """The decode engine read what these prompts need, no less, no more, without failure."""
        expected, failures = self.expected, int(self.added.total(f"{PREFIX}failures_total"))
        held = self.num_bytes == expected.num_bytes > 0 == failures
        detail = f"{self.num_bytes:,} bytes, expected {expected.num_bytes:,}"
        detail += f": {expected.source}" * bool(expected.source) + f"; {failures} failures"
        return Claim(f"{self.name}: the KV cache came over NIXL", held, detail)


@dataclass(frozen=True)
class Claim:
    text: str
    held: bool
    detail: str


HEADINGS = ("pass", "requests", "tokens", "KV bytes", "read ms", "max dlogprob", "equal")


def table(passes: Sequence[Pass]) -> str:
    """One row a pass; ``read ms`` is the mean from posting a read to its end."""
    rows = [HEADINGS, *map(_row, passes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _row(one: Pass) -> tuple[str, ...]:
    seconds, num = (one.added.total(f"{PREFIX}transfer_seconds_{end}") for end in ("sum", "count"))
    return (
        one.name,
        str(len(one.got)),
        str(sum(len(completion.token_ids) for completion in one.got)),
        f"{one.num_bytes:,}",
        f"{1000 * seconds / num if num else 0.0:.2f}",
        f"{one.max_logprob:.2g}",
        f"{one.num_equal}/{len(one.got)}",
    )


def verdict(claims: Sequence[Claim]) -> str:
    """A line a claim, then the verdict."""
    lines = [
        f"{'ok  ' if claim.held else 'FAIL'}  {claim.text} ({claim.detail})" for claim in claims
    ]
    broken = sum(not claim.held for claim in claims)
    end = f"{broken} of {len(claims)} did NOT hold" if broken else f"all {len(claims)} held"
    return "\n".join([*lines, f"VERDICT: {end}"])
