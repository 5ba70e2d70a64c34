"""Percentiles and goodput of a load's requests, and the verdict on two servers.  Pure.

Seconds throughout.  A request is good within limits on its time per output token and on its time
to the first one; one that failed never is.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_commext.limits import Limits

QUANTILES = (0.5, 0.9, 0.99)
FEW = 2
ALMOST_ALL = 0.99
"""Share of good requests from which on a rate is too low to tell two servers apart."""


@dataclass(frozen=True)
class Sample:
    """One request, its times counted from the moment it was to be sent."""

    at: float  # that moment, from the load's start
    prompt_tokens: int
    output_tokens: int
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0  # the longest time between two events
    error: str = ""  # why it failed
    placement: str = ""  # our proxy's headers of that name, and of the engine that answers
    engine: str = ""

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 of a single one."""
        return (self.last - self.first) / max(self.output_tokens - 1, 1)

    def is_good(self, limits: Limits) -> bool:
        return not self.error and limits.allow(self.tpot, self.first)


Round = Sequence[Sample]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that *share* of them do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else math.nan


def num_good(samples: Round, limits: Limits) -> int:
    return sum(one.is_good(limits) for one in samples)


def summary(samples: Round) -> dict[str, list[float]]:
    ended = [one for one in samples if not one.error]
    values = {
        "first": [one.first for one in ended],
        "tpot": [one.tpot for one in ended],
        "gap": [one.gap for one in ended],
        "end": [one.last for one in ended],
    }
    return {name: [quantile(of, share) for share in QUANTILES] for name, of in values.items()}


def tokens_per_second(samples: Round) -> float:
    """Tokens of all answers over the time from the start to the last of them."""
    ended = [one for one in samples if not one.error]
    return sum(one.output_tokens for one in ended) / max(
        (one.at + one.last for one in ended), default=math.inf
    )


def errors(samples: Round) -> Mapping[str, int]:
    return dict(Counter(one.error for one in samples if one.error).most_common())


def placements(samples: Round) -> Mapping[str, int]:
    kinds = (one.placement.partition(" ")[0].strip(";,") for one in samples if one.placement)
    return dict(Counter(kinds).most_common())


def engines(samples: Round) -> Mapping[str, int]:
    return dict(sorted(Counter(one.engine for one in samples if one.engine).items()))


@dataclass(frozen=True)
class Comparison:
    """Two contestants under the same loads.

    good, failed: requests of the first and of the second, over all rounds; total: of each; noise:
    the largest difference between two rounds of one of them, as a share, or that of `FEW` requests
    a round, if that is more; None with one round.
    """

    limits: Limits
    good: tuple[int, int]
    failed: tuple[int, int]
    total: int
    rounds: int
    noise: float | None

    @property
    def ratio(self) -> float:
        """Good requests of the second over those of the first."""
        if not self.good[0]:
            return math.inf if self.good[1] else 1.0
        return self.good[1] / self.good[0]

    @property
    def differs(self) -> bool:
        is_open = 2 * max(self.failed) <= self.total and min(self.good) < ALMOST_ALL * self.total
        away = max(self.ratio, 1 / self.ratio if self.ratio else math.inf) - 1
        is_more_than_few = abs(self.good[1] - self.good[0]) > FEW * self.rounds
        return is_open and self.noise is not None and away > self.noise and is_more_than_few


def compare(first: Sequence[Round], second: Sequence[Round], limits: Limits) -> Comparison:
    counts = [[num_good(one, limits) for one in rounds] for rounds in (first, second)]
    failed = [sum(bool(one.error) for of in rounds for one in of) for rounds in (first, second)]
    noise = None
    if min(map(len, counts)) > 1:
        most = max(sum(of) / len(of) for of in counts)
        noise = max(*(spread(of) for of in counts), FEW / max(most, 1))
    good = (sum(counts[0]), sum(counts[1]))
    total = sum(map(len, first))
    return Comparison(limits, good, (failed[0], failed[1]), total, len(first), noise)


def spread(counts: Sequence[float]) -> float:
    """By how much the largest exceeds the smallest, as a share of it."""
    if max(counts) == min(counts):
        return 0.0
    return max(counts) / min(counts) - 1 if min(counts) else math.inf


def verdict(names: tuple[str, str], found: Comparison) -> str:
    failed = [
        f"; {count} of {found.total} of {name} failed"
        for name, count in zip(names, found.failed, strict=True)
        if count
    ]
    return _verdict(names, found) + "".join(failed)


def _verdict(names: tuple[str, str], found: Comparison) -> str:
    first, second = names
    share = "without bound" if found.noise == math.inf else f"{100 * (found.noise or 0):.0f} %"
    noise = "" if found.noise is None else f" (noise {share})"
    if 2 * max(found.failed) > found.total:
        return "nothing can be said: most requests failed"
    if not any(found.good):
        return (
            f"neither {first} nor {second} serves any request within {found.limits}: "
            "lower the rate or loosen the limits"
        )
    if min(found.good) >= ALMOST_ALL * found.total:
        return (
            f"both serve all but {found.total - min(found.good)} of {found.total} requests within "
            f"{found.limits}: no difference at this rate; raise it to see one"
        )
    times = "many times" if math.isinf(found.ratio) else f"{found.ratio:.2f}x"
    said = f"{second} serves {times} the requests of {first} within {found.limits}{noise}"
    if found.noise is None:
        return f"{said}; one round shows no noise: measure two or more"
    if not found.differs:
        return f"no difference beyond noise: {said}"
    return f"{said}: {'worth it' if found.ratio > 1 else 'not worth it'}"
