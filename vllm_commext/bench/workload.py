"""Requests that come at times of their own: Poisson arrivals in several shapes, drawn from a seed,
or those of a trace; and their bodies, with prompts of random tokens.

The first ``shared_tokens`` tokens of a prompt are the beginning of its group's one sequence, the
rest is the request's own.  So what a server may hold of a prompt already is the longest such
beginning that has gone out before: see `held_tokens`.

Traces are Mooncake's: JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids``, one for each 512 tokens of the prompt.  Equal hash ids at the beginning of two prompts
are equal tokens.  An `Arrival` can say that of one sequence a group only, so where a trace
branches, a branch that others continue becomes a group of its own if it shares more with those than
with the one it left.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

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


LEAST_TOKEN = 3
"""Below it are tokens with a meaning of their own in most vocabularies."""
_GROUPS, _OWN = 0, 1


def bodies(
    arrivals: Sequence[Arrival], model: str, vocab_size: int, seed: Sequence[int]
) -> list[bytes]:
    """A streamed, greedy request of exactly ``output_tokens`` for each arrival.

    Tokens are the same for the same *seed* alone: two contestants of different seeds share no
    beginning of a prompt.
    """
    words = [str(token).encode() for token in range(vocab_size)]
    lengths: dict[int, int] = {}
    for one in arrivals:
        if one.group >= 0:
            lengths[one.group] = max(lengths.get(one.group, 0), one.shared_tokens)
    shared = {
        group: _tokens(words, length, (*seed, _GROUPS, group)) for group, length in lengths.items()
    }
    found: list[bytes] = []
    for place, one in enumerate(arrivals):
        begin = shared[one.group][: one.shared_tokens] if one.group >= 0 else []
        own = _tokens(words, one.prompt_tokens - len(begin), (*seed, _OWN, place))
        found.append(_body(model, b",".join(begin + own), one.output_tokens))
    return found


def _tokens(words: Sequence[bytes], count: int, seed: Sequence[int]) -> list[bytes]:
    drawn = np.random.default_rng(list(seed)).integers(LEAST_TOKEN, len(words), count)
    return [words[token] for token in drawn.tolist()]


def _body(model: str, prompt: bytes, output_tokens: int) -> bytes:
    options = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(options).encode()[:-1] + b', "prompt": [' + prompt + b"]}"


BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length")
_ROOT = -1


@dataclass
class _Line:
    at: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int] = field(default_factory=list[int])


def read_trace(path: Path) -> list[Arrival]:
    """All arrivals of a trace file, from its first one's time on.

    Raises:
        ConfigError: names the file, the line and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a trace of JSON lines, got {error}") from error
    try:
        return parse_trace(text.splitlines())
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error


def parse_trace(lines: Iterable[str]) -> list[Arrival]:
    """All arrivals of a trace's lines, empty ones left out, in the order of their times."""
    found = [_line(number, text) for number, text in enumerate(lines, 1) if text.strip()]
    if not found:
        raise ConfigError("expected at least one line with a request, got none")
    found.sort(key=lambda line: line.at)
    return _grouped(found)


def at_rate(arrivals: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """The trace's beginning, its times stretched so that *rate* requests a second come, and as
    much of it as comes within *seconds*."""
    span = arrivals[-1].at
    own_rate = (len(arrivals) - 1) / span if span else rate
    factor = own_rate / rate
    stretched = [replace(one, at=one.at * factor) for one in arrivals]
    return [one for one in stretched if one.at < seconds]


def _line(number: int, text: str) -> _Line:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number}: expected a JSON object, got {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"line {number}: expected a JSON object, got {text[:40]!r}")
    values = [_number(number, content, name) for name in _FIELDS]
    hash_ids = content.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(one) is int for one in hash_ids):
        raise ConfigError(f"line {number}: hash_ids: expected a list of integers")
    prompt, output = (max(round(value), 1) for value in values[1:])
    if len(hash_ids) > -(-prompt // BLOCK_TOKENS):
        raise ConfigError(
            f"line {number}: hash_ids: expected at most one for each {BLOCK_TOKENS} of "
            f"{prompt} tokens, got {len(hash_ids)}"
        )
    return _Line(values[0] / 1e3, prompt, output, hash_ids)


def _number(number: int, content: dict[str, Any], name: str) -> float:
    value: Any = content.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e15:
        raise ConfigError(f"line {number}: {name}: expected a number from 0 on, got {value!r}")
    return float(value)


def _grouped(lines: Sequence[_Line]) -> list[Arrival]:
    """Arrivals with groups: nodes of the tree of prefixes are numbered by (parent, hash id)."""
    nodes: dict[tuple[int, int], int] = {}
    visits: Counter[int] = Counter()
    paths: list[list[int]] = []
    for line in lines:
        parent, path = _ROOT, list[int]()
        for one in line.hash_ids:
            parent = nodes.setdefault((parent, one), len(nodes))
            path.append(parent)
        visits.update(path)
        paths.append(path)
    owner: dict[int, int] = {}
    tips: dict[int, int] = {}
    found: list[Arrival] = []
    start = lines[0].at
    for line, path in zip(lines, paths, strict=True):
        kept = sum(visits[node] > 1 for node in path)  # the beginning that others have, too
        known = next((depth for depth in range(kept, 0, -1) if path[depth - 1] in owner), 0)
        group = owner[path[known - 1]] if known else -1
        branches = group < 0 or tips[group] != path[known - 1]
        if branches and kept - known > known:
            group = len(tips)
        elif branches:
            kept = known
        if group >= 0 and kept > known:
            tips[group] = path[kept - 1]
            owner |= dict.fromkeys(path[known:kept], group)
        shared = min(kept * BLOCK_TOKENS, line.prompt_tokens) if group >= 0 else 0
        found.append(
            Arrival(line.at - start, line.prompt_tokens, line.output_tokens, group, shared)
        )
    return found
