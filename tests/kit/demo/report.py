"""What the demo found: one row a pass, one line a claim, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tests.kit.metrics import Metrics
from tests.kit.parity import Completion, Difference, compare

PREFIX = "vllm:commext_nixl_"
# The largest of a few hundred differences is itself a matter of chance, so twice the largest that
# the single server shows against itself is allowed. Where it shows none, none is allowed.
NOISE_MARGIN = 2.0


@dataclass(frozen=True)
class Noise:
    """How far the single server is from itself.

    ``agrees``: for each prompt, whether its tokens were the same in both runs.
    ``max_logprob``: largest difference of a logprob, nats.
    ``allows_ties``: another token is as good where the single server finds it as likely, within
    the tolerance.
    """

    agrees: tuple[bool, ...]
    max_logprob: float
    allows_ties: bool = False

    @classmethod
    def none(cls, num_prompts: int) -> Noise:
        return cls((True,) * num_prompts, 0.0)

    @classmethod
    def of_rounding(cls, one: Sequence[Completion], other: Sequence[Completion]) -> Noise:
        found = cls.between(one, other)
        return cls((True,) * len(found.agrees), found.max_logprob, found.max_logprob > 0)

    @classmethod
    def between(cls, one: Sequence[Completion], other: Sequence[Completion]) -> Noise:
        found = [compare(*pair) for pair in zip(one, other, strict=True)]
        return cls(
            tuple(difference.tokens_equal for difference in found),
            max(difference.max_logprob for difference in found),
        )

    @property
    def tolerance(self) -> float:
        """Nats by which another server's logprobs may differ."""
        return NOISE_MARGIN * self.max_logprob

    def of(self, places: Sequence[int]) -> Noise:
        return replace(self, agrees=tuple(self.agrees[place] for place in places))

    def at_least(self, other: Noise) -> Noise:
        """The larger one of two noises of the same prompts."""
        return max(self, other, key=lambda noise: noise.max_logprob)

    def compare_all(
        self, expected: Sequence[Completion], got: Sequence[Completion]
    ) -> list[Difference]:
        """Compare another server's answers.

        Where the single server does not agree with itself on a token, only the logprobs up to that
        token must be within the tolerance.
        """
        pairs = zip(expected, got, self.agrees, strict=True)
        return [self._compare(one, other, agrees) for one, other, agrees in pairs]

    def _compare(self, expected: Completion, got: Completion, agrees: bool) -> Difference:
        found = compare(expected, got, self.tolerance)
        excused = not agrees or (self.allows_ties and _first_is_tie(expected, got, self.tolerance))
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
    """What a pass must make the decode engine read.

    ``num_blocks``: None where only the bytes are claimed. ``source``: how the number of bytes is
    known, where it was not computed beforehand.
    """

    num_bytes: int
    num_blocks: int | None = None
    source: str = ""


@dataclass(frozen=True)
class Traffic:
    BYTES: ClassVar[str] = PREFIX + "bytes_total"

    num_blocks: int
    num_bytes: int
    num_reads: int
    seconds: float
    num_failures: int

    @classmethod
    def of(cls, added: Metrics) -> Traffic:
        """From what a pass added to the decode engine's metrics."""
        return cls(
            int(added.total(PREFIX + "blocks_total")),
            int(added.total(cls.BYTES)),
            int(added.total(PREFIX + "transfer_seconds_count")),
            added.total(PREFIX + "transfer_seconds_sum"),
            int(added.total(PREFIX + "failures_total")),
        )


@dataclass(frozen=True)
class Pass:
    """Requests sent in one way, and how they compare with the single server's answers."""

    name: str
    got: Sequence[Completion]
    differences: Sequence[Difference]
    traffic: Traffic
    expected: Expected

    @property
    def num_equal(self) -> int:
        return sum(difference.equal for difference in self.differences)

    @property
    def max_logprob(self) -> float:
        return max(difference.max_logprob for difference in self.differences)

    def claim_equal(self, noise: Noise) -> Claim:
        first = next((place for place, one in enumerate(self.differences) if not one.equal), None)
        within = f"within {noise.tolerance:.2g} nats" if noise.tolerance else "exactly"
        detail = f"{self.num_equal} of {len(self.got)}, logprobs {within}"
        changed = sum(not one.tokens_equal for one in self.differences if one.equal)
        if noise.allows_ties and changed:
            detail += f"; {changed} took another token that was as likely"
        if not all(noise.agrees):
            detail += f"; the single server disagrees with itself on {noise.agrees.count(False)}"
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
        expected, traffic = self.expected, self.traffic
        held = traffic.num_bytes == expected.num_bytes > 0
        detail = f"{traffic.num_bytes:,} bytes, expected {expected.num_bytes:,}"
        if expected.num_blocks is not None:
            held = held and traffic.num_blocks == expected.num_blocks
            detail = (
                f"{traffic.num_bytes:,} bytes in {traffic.num_blocks} blocks, expected "
                f"{expected.num_bytes:,} in {expected.num_blocks}"
            )
        if expected.source:
            detail += f": {expected.source}"
        detail += f"; {traffic.num_failures} failures"
        held = held and traffic.num_failures == 0
        return Claim(f"{self.name}: the KV cache came over NIXL", held, detail)


@dataclass(frozen=True)
class Claim:
    text: str
    held: bool
    detail: str


HEADINGS = ("pass", "requests", "tokens", "blocks", "KV bytes", "read ms", "max dlogprob", "equal")


def table(passes: Sequence[Pass]) -> str:
    """One row a pass; ``read ms`` is the mean from posting a read to its end."""
    rows = [HEADINGS, *map(_row, passes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _row(one: Pass) -> tuple[str, ...]:
    traffic = one.traffic
    milliseconds = 1000 * traffic.seconds / traffic.num_reads if traffic.num_reads else 0.0
    return (
        one.name,
        str(len(one.got)),
        str(sum(len(completion.token_ids) for completion in one.got)),
        str(traffic.num_blocks),
        f"{traffic.num_bytes:,}",
        f"{milliseconds:.2f}",
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
