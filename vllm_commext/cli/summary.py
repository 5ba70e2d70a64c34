"""The short form of the doctor's report: the verdict, what is amiss, a line a group, and what could
be switched on.  Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from vllm_commext import __version__
from vllm_commext.cli.report import MARKS, Check, Level, exit_status, wrapped
from vllm_commext.cli.suggestions import Suggestion, suggestions

TITLES = {"vllm": "vLLM", "apis": "API checks", "nixl": "NIXL", "gpu": "GPUs"}
"""What a section is called where its name in the JSON says little."""
TITLE_COLUMNS = 14
VERDICTS = {0: "ready", 1: "ready, with warnings", 2: "broken"}
SEVERITY = (Level.OK, Level.INFO, Level.WARNING, Level.ERROR)


def as_summary(checks: Sequence[Check]) -> str:
    """The report in about fifteen lines; `as_text` has every check."""
    lines = [_verdict(checks), ""]
    for check in checks:
        if check.level in (Level.WARNING, Level.ERROR):
            lines += _problem(check)
    for section, found in groupby(checks, key=lambda check: check.section):
        lines.append(_group(section, list(found)))
    offered = suggestions(checks)
    if offered:
        lines += ["", "Could be switched on here, for a start of vLLM:", *map(_offer, offered)]
    return "\n".join([*lines, "", f"All {len(checks)} checks: vllm-commext doctor --verbose"])


def _verdict(checks: Sequence[Check]) -> str:
    counts = [
        f"{number} {level.value}{'s' if number > 1 else ''}"
        for level in (Level.ERROR, Level.WARNING)
        if (number := sum(check.level is level for check in checks))
    ]
    named = VERDICTS[exit_status(checks)] + (f" ({', '.join(counts)})" if counts else "")
    return f"vllm_commext {__version__}: {named}"


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


def _offer(one: Suggestion) -> str:
    lead = "  "
    return f"{lead}export {one.line}\n{lead}    {wrapped(one.brings, len(lead) + 4)}"


def _count(checks: Sequence[Check]) -> str:
    """How many of a group's checks are well."""
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
    """How many parts have which verdict, which stands before each one's reason."""
    verdicts = Counter(check.value.partition(":")[0] for check in checks)
    return ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())


def _capabilities(checks: Sequence[Check]) -> str:
    active = [check.name for check in checks if check.value.startswith("active")]
    others = [check.name for check in checks if check.name not in active]
    off = f"; not active: {', '.join(others)}" if others else ""
    return f"active: {', '.join(active) or 'none'}{off}"


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
