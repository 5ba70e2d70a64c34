"""Reader of Mooncake's request traces: JSON lines with ``timestamp`` (ms), ``input_length``,
``output_length`` and ``hash_ids``, one for each 512 tokens of the prompt.  Pure but for the file.

Equal hash ids at the beginning of two prompts are equal tokens.  An `Arrival` can say that of one
sequence a group only, so where a trace branches, a branch that others continue becomes a group of
its own if it shares more with those than with the one it left.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_commext.bench.workload import Arrival
from vllm_commext.errors import ConfigError

BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length")
_ROOT = -1


@dataclass
class _Line:
    at: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int] = field(default_factory=list[int])


def read(path: Path) -> list[Arrival]:
    """All arrivals of a trace file, from its first one's time on.

    Raises:
        ConfigError: names the file, the line and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a trace of JSON lines, got {error}") from error
    try:
        return parse(text.splitlines())
    except ConfigError as error:
        raise ConfigError(f"{path}, {error}") from error


def parse(lines: Iterable[str]) -> list[Arrival]:
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
