"""The checks of `vllm-commext doctor`, and their two forms, text and JSON. Pure."""

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

import msgspec

from vllm_commext import __version__
from vllm_commext.limited_log import on_one_line

JSON_SCHEMA = 1
"""Grows when a field of the JSON goes or changes its meaning; docs/doctor.md has them."""
NAME_COLUMNS = 30
LINE_COLUMNS = 100


class Level(StrEnum):
    """OK and INFO are well; WARNING: something is refused or missing; ERROR: it is broken."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Check(msgspec.Struct, frozen=True):
    """One line of the report."""

    section: str  # that it is printed under
    name: str  # unique in its section
    value: str  # the finding
    level: Level = Level.INFO  # how good that is
    hint: str = ""  # the remedy


class Found(NamedTuple):
    """A probe's verdict."""

    value: str
    level: Level = Level.OK
    name: str = ""  # of the check where a row has several, else the row's
    remedy: str | None = None  # the row's, if None; printed unless the level is OK


class Row(NamedTuple):
    """One row of the table; its probe gives one verdict or several, or none where it is nothing to
    this machine."""

    section: str
    name: str
    probe: Callable[[], "Found | Iterable[Found]"]
    remedy: str = ""

    def checks(self) -> Iterator[Check]:
        """Run the probe; what it found before it raised is kept."""
        failure = self.name or "probe"
        try:
            found = self.probe()
            for one in (found,) if isinstance(found, Found) else found:
                remedy = self.remedy if one.remedy is None else one.remedy
                hint = "" if one.level is Level.OK else remedy
                name = one.name or self.name
                failure = f"probe of {name}" if name == failure else failure
                yield Check(self.section, name, one.value, one.level, hint)
        except Exception as error:  # noqa: BLE001 - the report must say what went wrong
            value = f"{type(error).__name__}: {error}"
            yield Check(self.section, failure, value, Level.ERROR)


EXIT_STATUS = {Level.OK: 0, Level.INFO: 0, Level.WARNING: 1, Level.ERROR: 2}
MARKS = {Level.OK: "ok", Level.INFO: "--", Level.WARNING: "WARN", Level.ERROR: "FAIL"}
VERDICTS = {0: "ready", 1: "ready, with warnings", 2: "broken"}
HEADLINES = {
    **{"package": ("vllm_commext", "native queue"), "vllm": ("vllm",)},
    **{"nixl": ("nixl", "backend UCX"), "gpu": ("GPUs", "peer access")},
    "machine": ("/dev/shm", "side channel"),
}
"""Checks that the short report has beside problems, toggles that are set, and capabilities."""


def exit_status(checks: Iterable[Check]) -> int:
    """0: all is well. 1: at least one warning. 2: at least one error."""
    return max((EXIT_STATUS[check.level] for check in checks), default=0)


def as_text(checks: Sequence[Check], *, every: bool) -> str:
    """The verdict, and aligned lines under their sections: of every check, or problems first, then
    headlines alone."""
    shown = checks
    if not every:
        problems = [check for check in checks if EXIT_STATUS[check.level]]
        shown = [*problems, *(check for check in checks if _is_headline(check))]
    lines = [_verdict(checks)]
    for section, group in groupby(shown, key=lambda check: check.section):
        lines.append(f"\n{section}")
        for check in group:
            lead = f"  {MARKS[check.level]:<5}{check.name:<{NAME_COLUMNS}} "
            lines.append(lead + _wrapped(check.value, len(lead)))
            if check.hint:
                lines.append(" " * len(lead) + _wrapped(f"-> {check.hint}", len(lead)))
    if not every:
        whole = f"To see all {len(checks)} checks: vllm-commext doctor --verbose"
        lines.append(f"\n--: off, or not here. {whole}")
    return "\n".join(lines)


def _is_headline(check: Check) -> bool:
    return not EXIT_STATUS[check.level] and (
        check.name in HEADLINES.get(check.section, ())
        or check.section == "capabilities"
        or (check.section == "toggles" and "(default)" not in check.value)
    )


def _verdict(checks: Sequence[Check]) -> str:
    counts = [
        f"{number} {level.value}{'s' if number > 1 else ''}"
        for level in (Level.ERROR, Level.WARNING)
        if (number := sum(check.level is level for check in checks))
    ]
    named = VERDICTS[exit_status(checks)] + (f" ({', '.join(counts)})" if counts else "")
    return f"vllm_commext {__version__}: {named}"


def _wrapped(text: str, indent: int) -> str:
    """Wrap at `LINE_COLUMNS`, all lines but the first behind `indent` blanks.

    What cannot be printed is escaped: some of it a library or the environment has said.
    """
    text = on_one_line(" ".join(text.split()))
    lines = textwrap.wrap(text, LINE_COLUMNS - indent, break_on_hyphens=False) or [""]
    return f"\n{' ' * indent}".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    report = {
        "schema": JSON_SCHEMA,
        "version": __version__,
        "status": exit_status(checks),
        "checks": msgspec.to_builtins(checks),
    }
    return json.dumps(report, indent=2)


encode = msgspec.json.Encoder().encode
"""Checks as a probe's process hands them over."""
decode = msgspec.json.Decoder(list[Check]).decode
