"""What `vllm-commext doctor` finds, and its forms: a summary with what could be switched on, an
aligned table, and JSON. Pure.

The JSON is an object with ``schema`` (1; it changes when a field changes its meaning or goes),
``version`` (of this package), ``status`` (the exit status) and ``checks``, a list of objects
with the strings ``section``, ``name``, ``value``, ``level`` and ``hint``.
"""

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

import msgspec

from vllm_commext import __version__
from vllm_commext.limited_log import on_one_line

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


class Found(NamedTuple):
    """A probe's verdict.

    Attributes:
        value: what was found.
        level: how good that is.
        name: of the check where a row has several, else the row's.
        remedy: the row's, if None; printed unless all is well.
    """

    value: str
    level: Level = Level.OK
    name: str = ""
    remedy: str | None = None


class Row(NamedTuple):
    """One row of the table; its probe gives one verdict or several, or none where it is nothing to
    this machine."""

    section: str
    name: str
    probe: Callable[[], "Found | Iterable[Found]"]
    remedy: str = ""

    def checks(self) -> Iterator[Check]:
        """Run the probe; what it found before it raised is kept."""
        try:
            found = self.probe()
            for one in (found,) if isinstance(found, Found) else found:
                remedy = self.remedy if one.remedy is None else one.remedy
                hint = "" if one.level is Level.OK else remedy
                yield Check(self.section, one.name or self.name, one.value, one.level, hint)
        except Exception as error:  # noqa: BLE001 - the report must say what went wrong
            value = f"{type(error).__name__}: {error}"
            yield Check(self.section, self.name or "probe", value, Level.ERROR)


EXIT_STATUS = {Level.OK: 0, Level.INFO: 0, Level.WARNING: 1, Level.ERROR: 2}
MARKS = {Level.OK: "ok", Level.INFO: "--", Level.WARNING: "WARN", Level.ERROR: "FAIL"}


def exit_status(checks: Iterable[Check]) -> int:
    """0: all is well. 1: at least one warning. 2: at least one error."""
    return max((EXIT_STATUS[check.level] for check in checks), default=0)


def wrapped(text: str, indent: int) -> str:
    """Wrap a text at `LINE_COLUMNS`, all lines but the first behind `indent` blanks.

    It may be a peer's: what cannot be printed is escaped.
    """
    text = on_one_line(" ".join(text.split()))
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


OFFER = "VLLM_COMMEXT_REDUCE_RMS=auto"
OFFERED = (
    "QK RMSNorm of MiniMax-M2 with tensor parallelism takes 1.29x to 1.63x less time (1 and 2,048 "
    "tokens, two and four H200, docs/performance.md); `auto` leaves other models alone"
)


def can_offer(checks: Sequence[Check]) -> bool:
    """Whether `OFFER` is off here, and these are two or four H200 that reach one another."""
    found = {(check.section, check.name): check for check in checks}
    off = found.get(("capabilities", "reduce_rms"))
    peers = found.get(("gpu", "peer access"))
    names = [check.value for check in checks if check.name.removeprefix("GPU ").isdigit()]
    return (
        off is not None
        and off.value.startswith("off")
        and peers is not None
        and peers.level is Level.OK
        and len(names) in (2, 4)
        and all(name.startswith("NVIDIA H200") for name in names)
    )


TITLES = {"vllm": "vLLM", "nixl": "NIXL", "gpu": "GPUs"}
"""What a section is called where its name in the JSON says little."""
TITLE_COLUMNS = 14
VERDICTS = {0: "ready", 1: "ready, with warnings", 2: "broken"}
NO_VLLM = ("vllm", "vllm", "not installed")
LATER = {"nixl": "in engines that name it", "allreduce": "decided for each group of ranks"}
"""Capabilities that are on, and take part only if more holds."""
SEVERITY = (Level.OK, Level.INFO, Level.WARNING, Level.ERROR)


def as_summary(checks: Sequence[Check]) -> str:
    """The report in about fifteen lines; `as_text` has every check."""
    lines = [_verdict(checks), ""]
    for check in checks:
        if check.level in (Level.WARNING, Level.ERROR):
            lines += _problem(check)
    for section, group in groupby(checks, key=lambda check: check.section):
        found = list(group)
        if not _is_told(section, found):
            lines.append(_group(section, found))
    if can_offer(checks):
        lines += ["", "Could be switched on here, for a start of vLLM:", f"  export {OFFER}"]
        lines.append(f"      {wrapped(OFFERED, 6)}")
    return "\n".join([*lines, "", f"All {len(checks)} checks: vllm-commext doctor --verbose"])


def _verdict(checks: Sequence[Check]) -> str:
    counts = [
        f"{number} {level.value}{'s' if number > 1 else ''}"
        for level in (Level.ERROR, Level.WARNING)
        if (number := sum(check.level is level for check in checks))
    ]
    named = VERDICTS[exit_status(checks)] + (f" ({', '.join(counts)})" if counts else "")
    if any((check.section, check.name, check.value) == NO_VLLM for check in checks):
        named = f"vLLM is not installed, only `proxy` and `bench` can run here; {named}"
    return f"vllm_commext {__version__}: {named}"


def _is_told(section: str, checks: Sequence[Check]) -> bool:
    """Whether the group is one library that is missing, which its problem has said already."""
    return len(checks) == 1 and checks[0].name == section and bool(EXIT_STATUS[checks[0].level])


def _problem(check: Check) -> list[str]:
    title = TITLES.get(check.section, check.section)
    lead = f"  {MARKS[check.level]:<5}"
    text = wrapped(f"{title}, {check.name}: {check.value}", len(lead))
    hint = [" " * len(lead) + wrapped(f"-> {check.hint}", len(lead))] if check.hint else []
    return [lead + text, *hint]


def _group(section: str, checks: Sequence[Check]) -> str:
    worst = max((check.level for check in checks), key=SEVERITY.index)
    mark = MARKS[worst if worst is not Level.INFO else Level.OK]
    lead = f"  {mark:<5}{TITLES.get(section, section):<{TITLE_COLUMNS}} "
    return lead + wrapped(HEADLINES.get(section, _count)(checks), len(lead))


def _count(checks: Sequence[Check]) -> str:
    well = sum(check.level in (Level.OK, Level.INFO) for check in checks)
    return f"{well} of {len(checks)} hold"


def _values(**labels: str) -> Callable[[Sequence[Check]], str]:
    """The values of these checks, those that were made, each behind its label."""

    def joined(checks: Sequence[Check]) -> str:
        found = {check.name: check.value for check in checks}
        said = [f"{label}{found[name]}" for name, label in labels.items() if name in found]
        return "; ".join(said) or _count(checks)

    return joined


def _toggles(checks: Sequence[Check]) -> str:
    chosen = [
        f"{check.name}={check.value.split()[0]}"
        for check in checks
        if "(default)" not in check.value
    ]
    return f"set: {', '.join(chosen)}" if chosen else "all at their defaults"


def _parts(checks: Sequence[Check]) -> str:
    """Count parts by verdict, which stands before each one's reason."""
    verdicts = Counter(check.value.partition(":")[0] for check in checks)
    return ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())


def _capabilities(checks: Sequence[Check]) -> str:
    active = [check.name for check in checks if check.value.startswith("active")]
    others = [check.name for check in checks if check.name not in active]
    off = f"; off: {', '.join(others)}" if others else ""
    on = [name + (f" ({LATER[name]})" if name in LATER else "") for name in active]
    return f"on: {', '.join(on) or 'none'}{off}"


def _gpus(checks: Sequence[Check]) -> str:
    names = [check.value for check in checks if check.name.removeprefix("GPU ").isdigit()]
    if not names:
        return "none"
    rest = _values(**{"peer access": "peer access: "})(checks) if len(names) > 1 else ""
    return f"{len(names)} x {names[0]}" + (f"; {rest}" if rest else "")


HEADLINES: dict[str, Callable[[Sequence[Check]], str]] = {
    "package": _values(**{"vllm_commext": "", "native queue": "native queue: "}),
    "toggles": _toggles,
    "vllm": _values(vllm=""),
    "parts": _parts,
    "capabilities": _capabilities,
    "nixl": _values(**{"nixl": "", "backend UCX": "UCX "}),
    "gpu": _gpus,
    "machine": _values(**{"/dev/shm": "/dev/shm: ", "side channel": "side channel: "}),
}
"""What a group's line says; the others count what holds."""
