"""Requests that come at times of their own: Poisson arrivals in several shapes, drawn from a seed,
or those of a trace; and their bodies, with prompts of random tokens.

The first ``shared_tokens`` tokens of a prompt are the beginning of its group's one sequence, the
rest is the request's own.

Traces are Mooncake's (docs/bench.md). An `Arrival` can name one sequence a group only, so a branch
that others continue is a group of its own if it shares more with those than with the one it left.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from vllm_commext.errors import ConfigError


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds from the start
    prompt_tokens: int
    output_tokens: int
    group: int = -1  # arrivals of one group, from 0 on, begin alike; -1: of none
    shared_tokens: int = 0


@dataclass(frozen=True)
class Draw:
    """A lognormal number of tokens.  The mean is that before the clipping to [least, most]."""

    mean: float
    sigma: float
    least: int
    most: int

    def tokens(self, dice: random.Random) -> int:
        drawn = dice.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), self.least), self.most)


Shape = Callable[[float, float, int], list[Arrival]]
"""Arrivals of a rate (requests a second), a duration (seconds) and a seed."""


def poisson_times(rate: float, seconds: float, dice: random.Random) -> list[float]:
    """Rising times below *seconds*, *rate* a second on average."""
    times: list[float] = []
    at = dice.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += dice.expovariate(rate)
    return times


def _single(prompt: Draw, output: Draw) -> Shape:
    def draw(rate: float, seconds: float, seed: int) -> list[Arrival]:
        dice = random.Random(seed)
        return [
            Arrival(at, prompt.tokens(dice), output.tokens(dice))
            for at in poisson_times(rate, seconds, dice)
        ]

    return draw


MIXED = "mixed"
WORKLOADS: Mapping[str, Shape] = {
    MIXED: _single(Draw(4000, 1.0, 256, 16000), Draw(160, 0.7, 16, 512)),
    "document": _single(Draw(8000, 0.0, 1, 8000), Draw(256, 0.0, 1, 256)),
    "short": _single(Draw(512, 0.0, 1, 512), Draw(128, 0.0, 1, 128)),
}


def scaled(arrivals: Sequence[Arrival], factor: float, most: int) -> list[Arrival]:
    """The same arrivals with *factor* times the tokens, at least one, and prompt and answer
    together at most *most*: beyond, an answer of more than half is cut first."""

    def size(tokens: int, most: int) -> int:
        return min(max(round(tokens * factor), 1), most)

    found: list[Arrival] = []
    for one in arrivals:
        output = size(one.output_tokens, max(most - size(one.prompt_tokens, most), most // 2))
        prompt = size(one.prompt_tokens, most - output)
        shared = min(round(one.shared_tokens * factor), prompt)
        found.append(replace(one, prompt_tokens=prompt, output_tokens=output, shared_tokens=shared))
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


CHUNK_TOKENS = 16
"""Tokens of a hash id in the traces of ``vllm bench serve``, by default."""


def timed_trace(arrivals: Sequence[Arrival]) -> str:
    """JSON lines for ``vllm bench serve --dataset-name timed_trace``, times in seconds.

    What prompts share is cut to whole chunks.
    """
    ids: dict[tuple[int, int, int], int] = {}
    lines: list[str] = []
    for place, one in enumerate(arrivals):
        shared = one.shared_tokens // CHUNK_TOKENS if one.group >= 0 else 0
        chunks = range(-(-one.prompt_tokens // CHUNK_TOKENS))
        keys = [(_GROUPS, one.group, n) if n < shared else (_OWN, place, n) for n in chunks]
        line = {"timestamp": one.at, "input_length": one.prompt_tokens}
        line |= {"output_length": one.output_tokens}
        lines.append(json.dumps({**line, "hash_ids": [ids.setdefault(k, len(ids)) for k in keys]}))
    return "\n".join(lines) + "\n"


BLOCK_TOKENS = 512
_ROOT = -1


_Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]


class _Line(msgspec.Struct):
    """`timestamp` in ms, numbers of tokens, a hash id for each `BLOCK_TOKENS` of the prompt."""

    timestamp: _Amount
    input_length: _Amount
    output_length: _Amount
    hash_ids: list[int] = []

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and answer, at least one each."""
        return max(round(self.input_length), 1), max(round(self.output_length), 1)


def read_trace(path: Path) -> list[Arrival]:
    """All arrivals of a trace file, from its first one's time on. Raises `ConfigError` that names
    the file, the line and what was expected."""
    try:
        return parse_trace(path.read_text(encoding="utf-8").splitlines())
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a trace of JSON lines, got {error}") from error


def parse_trace(lines: Iterable[str]) -> list[Arrival]:
    """All arrivals of a trace's lines, empty ones left out, in the order of their times."""
    found = [_line(number, text) for number, text in enumerate(lines, 1) if text.strip()]
    if not found:
        raise ConfigError("expected at least one line with a request, got none")
    found.sort(key=lambda line: line.timestamp)
    return _grouped(found)


def at_rate(arrivals: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """The trace's beginning, its times stretched so that *rate* requests a second come, and as
    much of it as comes within *seconds*."""
    span = arrivals[-1].at
    own_rate = (len(arrivals) - 1) / span if span else rate
    stretched = [replace(one, at=one.at * own_rate / rate) for one in arrivals]
    return [one for one in stretched if one.at < seconds]


def _line(number: int, text: str) -> _Line:
    try:
        found = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        told = f"line {number}: expected a request, got {text[:40]!r}: {error}"
        raise ConfigError(told) from error
    prompt, _ = found.tokens
    if len(found.hash_ids) > -(-prompt // BLOCK_TOKENS):
        raise ConfigError(
            f"line {number}: hash_ids: expected at most one for each {BLOCK_TOKENS} of {prompt} "
            f"tokens, got {len(found.hash_ids)}"
        )
    return found


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
    start = lines[0].timestamp / 1e3
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
        prompt, output = line.tokens
        shared = min(kept * BLOCK_TOKENS, prompt) if group >= 0 else 0
        found.append(Arrival(line.timestamp / 1e3 - start, prompt, output, group, shared))
    return found
