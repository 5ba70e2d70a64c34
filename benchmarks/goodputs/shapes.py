"""Workloads beside those of ``vllm-commext bench``: turns, bursts, and windows of traces."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from vllm_commext.bench import workload
from vllm_commext.bench.workload import Arrival, Draw, Shape, poisson_times

LEFT_SECONDS = 60.0
CONVERSATION, AGENTIC = "conversation", "agentic"
CODE, BURST, BIMODAL = "code", "burst", "bimodal"


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

    def draw(self, rate: float, seconds: float, seed: int) -> list[Arrival]:
        """Arrivals, a group each conversation."""
        dice = random.Random(seed)
        open_ones: list[_Conversation] = []
        arrivals: list[Arrival] = []
        num_groups = 0
        for at in poisson_times(rate, seconds, dice):
            open_ones = [one for one in open_ones if one.ready_at > at - LEFT_SECONDS]
            ready = [one for one in open_ones if one.ready_at <= at]
            if ready and dice.random() >= 1 / self.turns:
                one = dice.choice(ready)
            else:
                one = _Conversation(num_groups, at, self.first.tokens(dice))
                num_groups += 1
                open_ones.append(one)
            tokens, output = one.next_tokens, self.output.tokens(dice)
            arrivals.append(Arrival(at, tokens, output, one.group, tokens))
            one.ready_at = at + self.pause
            one.next_tokens = tokens + output + self.added.tokens(dice)
            if one.next_tokens > self.most:
                open_ones.remove(one)
        return arrivals


@dataclass
class _Conversation:
    group: int
    ready_at: float
    next_tokens: int


def gamma_times(rate: float, seconds: float, dice: random.Random) -> list[float]:
    """Rising times below *seconds* in bursts: gaps vary three times as much as they last."""
    times: list[float] = []
    at = dice.gammavariate(1 / 9, 9 / rate)
    while at < seconds:
        times.append(at)
        at += dice.gammavariate(1 / 9, 9 / rate)
    return times


def _single(
    times: Callable[[float, float, random.Random], list[float]],
    prompt: Callable[[random.Random], int],
    output: Draw,
) -> Shape:
    def draw(rate: float, seconds: float, seed: int) -> list[Arrival]:
        dice = random.Random(seed)
        at = times(rate, seconds, dice)
        return [Arrival(one, prompt(dice), output.tokens(dice)) for one in at]

    return draw


_ANSWER = Draw(160, 0.7, 16, 512)
WORKLOADS: dict[str, Shape] = {
    **workload.WORKLOADS,
    CODE: _single(poisson_times, Draw(2048, 1.0, 64, 8000).tokens, Draw(28, 0.8, 4, 200)),
    BURST: _single(gamma_times, Draw(4000, 1.0, 256, 16000).tokens, _ANSWER),
    BIMODAL: _single(poisson_times, lambda dice: 12000 if dice.random() < 0.2 else 500, _ANSWER),
    # Mooncake's conversation trace: 12,035 tokens in, 343 out, 37 % of its blocks seen before.
    CONVERSATION: Conversations(
        first=Draw(11400, 1.0, 256, 32000),
        added=Draw(2200, 0.7, 32, 8000),
        output=Draw(343, 0.6, 16, 1024),
        turns=1.8,
        pause=5.0,
        most=32000,
    ).draw,
    AGENTIC: Conversations(
        first=Draw(6000, 0.3, 1000, 16000),
        added=Draw(400, 0.7, 16, 4000),
        output=Draw(120, 0.6, 16, 512),
        turns=12.0,
        pause=2.0,
        most=32000,
    ).draw,
}


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals of a trace in Mooncake's JSON lines or in Azure's CSV."""
    if path.suffix != ".csv":
        return workload.read_trace(path)
    found: list[Arrival] = []
    for row in csv.DictReader(path.read_text().splitlines()):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        found.append(Arrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    return found


def windows_of(trace: Sequence[Arrival]) -> Shape:
    """Windows that a seed chooses, their times scaled to the rate."""

    def draw(rate: float, seconds: float, seed: int) -> list[Arrival]:
        num = round(rate * seconds)
        begin = random.Random(seed).randrange(len(trace) - num)
        window = trace[begin : begin + num]
        start, scale = window[0].at, seconds / (window[-1].at - window[0].at)
        return [replace(one, at=(one.at - start) * scale) for one in window]

    return draw


def held_tokens(arrivals: Sequence[Arrival]) -> list[int]:
    """For each arrival, the tokens at its beginning that have gone out before it."""
    longest: dict[int, int] = {}
    found: list[int] = []
    for one in arrivals:
        shared = one.shared_tokens if one.group >= 0 else 0
        found.append(min(shared, longest.get(one.group, 0)))
        longest[one.group] = max(longest.get(one.group, 0), shared)
    return found
