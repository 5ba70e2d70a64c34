"""What the demo found: one row a pass, one line a claim, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_commext.testing.metrics import Metrics
from vllm_commext.testing.parity import Completion, Difference, compare

PREFIX = "vllm:commext_nixl_"
# The largest of a few hundred differences is itself a matter of chance, so twice the largest that
# the single server shows against itself is allowed. Where it shows none, none is allowed.
NOISE_MARGIN = 2.0


@dataclass(frozen=True)
class Noise:
    """How far the single server is from itself.

    ``agrees``: for each prompt, whether its tokens were the same in both runs.
    ``max_logprob``: largest difference of a logprob, nats.
    """

    agrees: tuple[bool, ...]
    max_logprob: float

    @classmethod
    def between(cls, one: Sequence[Completion], other: Sequence[Completion]) -> Noise:
        """Of two runs of the same prompts."""
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
        """The same, for some of the prompts."""
        return replace(self, agrees=tuple(self.agrees[place] for place in places))

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
        if not agrees and found.max_logprob <= self.tolerance:
            return replace(found, position=None)
        return found


@dataclass(frozen=True)
class Traffic:
    """What the decode engine read during a pass. ``num_blocks`` counts a block of all ranks
    once."""

    num_blocks: int
    num_bytes: int
    num_reads: int
    seconds: float
    num_failures: int

    @classmethod
    def of(cls, added: Metrics, tensor_parallel_size: int) -> Traffic:
        """From what a pass added to the decode engine's metrics."""
        return cls(
            int(added.total(PREFIX + "blocks_total")) // tensor_parallel_size,
            int(added.total(PREFIX + "bytes_total")),
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
    num_blocks_expected: int
    bytes_per_block: int

    @property
    def num_equal(self) -> int:
        """Requests with equal tokens, and logprobs within the tolerance."""
        return sum(difference.equal for difference in self.differences)

    @property
    def max_logprob(self) -> float:
        """Largest difference of a logprob, nats."""
        return max(difference.max_logprob for difference in self.differences)

    def claim_equal(self, noise: Noise) -> Claim:
        """All requests are equal."""
        first = next((place for place, one in enumerate(self.differences) if not one.equal), None)
        within = f"within {noise.tolerance:.2g} nats" if noise.tolerance else "exactly"
        detail = f"{self.num_equal} of {len(self.got)}, logprobs {within}"
        if not all(noise.agrees):
            detail += f"; the single server disagrees with itself on {noise.agrees.count(False)}"
        if first is not None:
            detail += (
                f"; first different: request {first}, a prompt of {len(self.got[first].prompt)} "
                f"tokens, {self.differences[first]}"
            )
        return Claim(f"{self.name}: answers equal the single server's", first is None, detail)

    def claim_noticed(self) -> Claim:
        """All requests are different, as they must be after damage on purpose."""
        num_noticed = len(self.got) - self.num_equal
        detail = f"{num_noticed} of {len(self.got)} differ, by up to {self.max_logprob:.2g} nats"
        return Claim(f"{self.name}: the damage is noticed", self.num_equal == 0, detail)

    def claim_transferred(self) -> Claim:
        """The decode engine read what these prompts need, no less, no more, without failure."""
        expected = self.num_blocks_expected * self.bytes_per_block
        traffic = self.traffic
        held = traffic.num_bytes == expected and traffic.num_blocks == self.num_blocks_expected
        detail = (
            f"{traffic.num_bytes:,} bytes in {traffic.num_blocks} blocks, expected {expected:,} in "
            f"{self.num_blocks_expected}; {traffic.num_failures} failures"
        )
        held = held and traffic.num_failures == 0
        return Claim(f"{self.name}: the KV cache came over NIXL", held, detail)


@dataclass(frozen=True)
class Claim:
    """Something that must hold, whether it did, and the numbers."""

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
