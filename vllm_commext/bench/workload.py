"""Requests that come at times of their own, drawn from a seed: Poisson arrivals in several shapes.

The first ``shared_tokens`` tokens of a prompt are the beginning of its group's one sequence, the
rest is the request's own.  So what a server may hold of a prompt already is the longest such
beginning that has gone out before: see `held_tokens`.  Pure.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_commext.errors import ConfigError

LEFT_SECONDS = 60.0


@dataclass(frozen=True)
class Arrival:
    """One request.

    at: seconds from the start; group: arrivals of the same group, from 0 on, begin alike; -1: of
    none.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    group: int = -1
    shared_tokens: int = 0


@dataclass(frozen=True)
class Draw:
    """A lognormal number of tokens.  The mean is that before the clipping to [least, most]."""

    mean: float
    sigma: float
    least: int
    most: int

    def tokens(self, dice: random.Random) -> int:
        """One number."""
        drawn = dice.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), self.least), self.most)


@dataclass(frozen=True)
class Conversations:
    """Prompts that grow by turns.

    A turn repeats the prompt before, adds as many tokens as that had for an answer, and new ones.
    Each arrival continues a conversation with probability 1 - 1 / ``turns`` where one is there
    whose last turn is ``pause`` to ``pause`` + `LEFT_SECONDS` ago and which stays within ``most``
    tokens.
    """

    first: Draw
    added: Draw
    output: Draw
    turns: float
    pause: float
    most: int


@dataclass
class _Conversation:
    group: int
    ready_at: float
    next_tokens: int


def poisson_times(rate: float, seconds: float, dice: random.Random) -> list[float]:
    """Rising times below *seconds*, *rate* a second on average."""
    times: list[float] = []
    at = dice.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += dice.expovariate(rate)
    return times


def _single(prompt: Draw, output: Draw) -> "Shape":
    def draw(rate: float, seconds: float, seed: int) -> list[Arrival]:
        dice = random.Random(seed)
        return [
            Arrival(at, prompt.tokens(dice), output.tokens(dice))
            for at in poisson_times(rate, seconds, dice)
        ]

    return draw


def _turns(shape: Conversations) -> "Shape":
    def draw(rate: float, seconds: float, seed: int) -> list[Arrival]:
        dice = random.Random(seed)
        open_ones: list[_Conversation] = []
        arrivals: list[Arrival] = []
        num_groups = 0
        for at in poisson_times(rate, seconds, dice):
            open_ones = [one for one in open_ones if one.ready_at > at - LEFT_SECONDS]
            ready = [one for one in open_ones if one.ready_at <= at]
            if ready and dice.random() >= 1 / shape.turns:
                one = dice.choice(ready)
            else:
                one = _Conversation(num_groups, at, shape.first.tokens(dice))
                num_groups += 1
                open_ones.append(one)
            tokens, output = one.next_tokens, shape.output.tokens(dice)
            arrivals.append(Arrival(at, tokens, output, one.group, tokens))
            one.ready_at = at + shape.pause
            one.next_tokens = tokens + output + shape.added.tokens(dice)
            if one.next_tokens > shape.most:
                open_ones.remove(one)
        return arrivals

    return draw


Shape = Callable[[float, float, int], list[Arrival]]
"""Arrivals of a rate (requests a second), a duration (seconds) and a seed."""
MIXED, CONVERSATION = "mixed", "conversation"
WORKLOADS: Mapping[str, Shape] = {
    MIXED: _single(Draw(4000, 1.0, 256, 16000), Draw(160, 0.7, 16, 512)),
    # Mooncake's conversation trace: 12,035 tokens in, 343 out, 37 % of its blocks seen before.
    CONVERSATION: _turns(
        Conversations(
            first=Draw(11400, 1.0, 256, 32000),
            added=Draw(2200, 0.7, 32, 8000),
            output=Draw(343, 0.6, 16, 1024),
            turns=1.8,
            pause=5.0,
            most=32000,
        )
    ),
    "document": _single(Draw(8000, 0.0, 1, 8000), Draw(256, 0.0, 1, 256)),
    "agentic": _turns(
        Conversations(
            first=Draw(6000, 0.3, 1000, 16000),
            added=Draw(400, 0.7, 16, 4000),
            output=Draw(120, 0.6, 16, 512),
            turns=12.0,
            pause=2.0,
            most=32000,
        )
    ),
    "short": _single(Draw(512, 0.0, 1, 512), Draw(128, 0.0, 1, 128)),
}


def make(name: str, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Arrivals of one of `WORKLOADS`, the same for the same arguments.

    Raises:
        ConfigError: no such workload, or a rate or duration that is not above zero.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"workload: expected one of {sorted(WORKLOADS)}, got {name!r}")
    if not (0 < rate < math.inf and 0 < seconds < math.inf):
        raise ConfigError(
            f"expected a rate and a duration above zero, got {rate} requests/s for {seconds} s"
        )
    return WORKLOADS[name](rate, seconds, seed)


def scaled(arrivals: Sequence[Arrival], factor: float, most: int) -> list[Arrival]:
    """The same arrivals with *factor* times the tokens, at least one, and prompt and answer
    together at most *most*."""

    def size(tokens: int, most: int) -> int:
        return min(max(round(tokens * factor), 1), most)

    found: list[Arrival] = []
    for one in arrivals:
        output = size(one.output_tokens, most // 2)
        prompt = size(one.prompt_tokens, most - output)
        shared = min(round(one.shared_tokens * factor), prompt)
        found.append(replace(one, prompt_tokens=prompt, output_tokens=output, shared_tokens=shared))
    return found


def held_tokens(arrivals: Sequence[Arrival]) -> list[int]:
    """For each arrival, the tokens at its beginning that have gone out before it."""
    longest: dict[int, int] = {}
    found: list[int] = []
    for one in arrivals:
        shared = one.shared_tokens if one.group >= 0 else 0
        found.append(min(shared, longest.get(one.group, 0)))
        longest[one.group] = max(longest.get(one.group, 0), shared)
    return found
