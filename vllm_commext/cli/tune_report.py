"""How the measurements of `vllm-commext tune` read: a table, and curves in plain characters."""

from collections.abc import Mapping, Sequence

from vllm_commext.allreduce.table.selection import size_text

BARS = "▁▂▃▄▅▆▇█"
ABSENT = "-"
Times = Mapping[int, Mapping[str, float]]


def columns(times: Times) -> list[str]:
    """The backends that were measured, those with the most sizes first."""
    names = sorted({name for of in times.values() for name in of})
    return sorted(names, key=lambda name: -sum(name in of for of in times.values()))


def as_table(times: Times) -> str:
    """Markdown: a row a size, microseconds a call, the fastest marked by an asterisk."""
    names = columns(times)
    lines = ["| size | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for size in sorted(times):
        of = times[size]
        best = min(of.values(), default=0.0)
        cells = [
            f"{of[name]:.1f}{'*' if of[name] == best else ''}" if name in of else ABSENT
            for name in names
        ]
        lines.append("| " + " | ".join([size_text(size), *cells]) + " |")
    return "\n".join(lines)


def slowdowns(times: Times, name: str) -> list[float | None]:
    """The backend's time over the best at each size, in rising order; None where it has none."""
    return [
        times[size][name] / min(times[size].values()) if name in times[size] else None
        for size in sorted(times)
    ]


def as_curves(times: Times) -> str:
    """A line a backend: how far it is from the best, from small sizes to large.

    The lowest bar is the fastest backend, the highest is twice its time or more.
    """
    names = columns(times)
    if not names:
        return ""
    width = max(map(len, names))
    lines = [f"{name:<{width}} {_bars(slowdowns(times, name))}" for name in names]
    sizes = sorted(times)
    span = f"{size_text(sizes[0])} .. {size_text(sizes[-1])}"
    return "\n".join([*lines, f"{'':<{width}} {span}; low is fast, full height is 2x the best"])


def _bars(values: Sequence[float | None]) -> str:
    steps = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[min(int((value - 1) * steps + 0.5), steps)]
        for value in values
    )


def progress_bar(done: int, total: int, columns_wide: int = 30) -> str:
    """``[####      ] 4/10``."""
    filled = columns_wide * done // max(total, 1)
    return f"[{'#' * filled:<{columns_wide}}] {done}/{total}"
