"""Records of loads that were played, and files of them.  Pure but for the files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_commext.bench.figures import Sample
from vllm_commext.limits import Limits

DIGITS = 5
_SAMPLES = "samples: at, first, last, gap, prompt, output, error, placement, engine"
NAMES = "workload", "rate", "round", "contestant", "told", "late", _SAMPLES


@dataclass(frozen=True)
class Play:
    """One load on one contestant: rate in requests a second; late: seconds that the client itself
    was late at most; told: limits that the contestant knew."""

    workload: str
    rate: float
    number: int
    contestant: str
    told: Limits | None
    late: float
    samples: Sequence[Sample]

    @property
    def cell(self) -> tuple[str, float]:
        return self.workload, self.rate


def as_line(play: Play) -> str:
    """A line of JSON."""
    samples = [
        [
            *(round(seconds, DIGITS) for seconds in (one.at, one.first, one.last, one.gap)),
            *(one.prompt_tokens, one.output_tokens, one.error, one.placement, one.engine),
        ]
        for one in play.samples
    ]
    told = [play.told.tpot, play.told.first] if play.told else None
    head = play.workload, play.rate, play.number, play.contestant, told, round(play.late, DIGITS)
    content = dict(zip(NAMES, (*head, samples), strict=True))
    return json.dumps(content, separators=(",", ":"))


def of_line(line: str) -> Play:
    """The play of such a line."""
    content = json.loads(line)
    *head, rows = content.values()
    workload, rate, number, contestant, told, late = head
    samples = [
        Sample(at, prompt, output, first, last, gap, *texts)
        for at, first, last, gap, prompt, output, *texts in rows
    ]
    limits = Limits(*told) if told else None
    return Play(workload, rate, number, contestant, limits, late, samples)


def append(path: Path, plays: Iterable[Play]) -> None:
    """Add plays to a file of such lines."""
    with path.open("a") as file:
        file.writelines(as_line(play) + "\n" for play in plays)


def read(path: Path) -> list[Play]:
    """All plays of a file."""
    return [of_line(line) for line in path.read_text().splitlines()]
