"""What `vllm-commext doctor` finds, and two of its forms: an aligned table and JSON.

The JSON is an object with ``schema`` (1; it changes when a field changes its meaning or goes),
``version`` (of this package), ``status`` (the exit status) and ``checks``, a list of objects
with the strings ``section``, ``name``, ``value``, ``level`` and ``hint``.
"""

import json
import textwrap
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from vllm_commext import __version__

JSON_SCHEMA = 1
NAME_COLUMNS = 30
LINE_COLUMNS = 100


class Level(StrEnum):
    """OK and INFO are well; WARNING: something is refused or missing; ERROR: it is broken."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Check(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        section: the group that it is printed under.
        name: what was looked at; unique in its section.
        value: what was found.
        level: how good that is.
        hint: what to do about it; may be empty.
    """

    section: str
    name: str
    value: str
    level: Level = Level.INFO
    hint: str = ""


EXIT_STATUS = {Level.OK: 0, Level.INFO: 0, Level.WARNING: 1, Level.ERROR: 2}
MARKS = {Level.OK: "ok", Level.INFO: "--", Level.WARNING: "WARN", Level.ERROR: "FAIL"}


def exit_status(checks: Iterable[Check]) -> int:
    """0: all is well. 1: at least one warning. 2: at least one error."""
    return max((EXIT_STATUS[check.level] for check in checks), default=0)


def wrapped(text: str, indent: int) -> str:
    """The text in lines of `LINE_COLUMNS`, all but the first behind `indent` blanks."""
    lines = textwrap.wrap(text, LINE_COLUMNS - indent, break_on_hyphens=False) or [""]
    return f"\n{' ' * indent}".join(lines)


def as_text(checks: Sequence[Check]) -> str:
    """Aligned lines, with a heading wherever the section changes."""
    lines: list[str] = []
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            lines.append(f"\n{section}")
        lead = f"  {MARKS[check.level]:<5}{check.name:<{NAME_COLUMNS}} "
        lines.append(lead + wrapped(check.value, len(lead)))
        if check.hint:
            lines.append(" " * len(lead) + wrapped(f"-> {check.hint}", len(lead)))
    return "\n".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    """The whole report as one JSON object; see the module's docstring."""
    report = {
        "schema": JSON_SCHEMA,
        "version": __version__,
        "status": exit_status(checks),
        "checks": msgspec.to_builtins(checks),
    }
    return json.dumps(report, indent=2)


def encode(checks: Sequence[Check]) -> bytes:
    """Checks as a probe's process hands them over."""
    return msgspec.json.encode(checks)


def decode(data: bytes) -> list[Check]:
    """The inverse of `encode`.

    Raises:
        msgspec.DecodeError: the data is no list of checks.
    """
    return msgspec.json.decode(data, type=list[Check])
