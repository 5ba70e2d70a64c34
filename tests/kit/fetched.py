"""Packages that few tests and demos need: from pip's index when they are asked for, outside of the
environment."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_commext.errors import UnsupportedError

FOLDER = Path(__file__).resolve().parents[2] / "build" / "fetched"


def fetched(*requirements: str) -> Path:
    """A folder for ``PYTHONPATH`` that holds these packages, without what they require themselves.

    It is filled once. Raises ``UnsupportedError`` where pip cannot fetch them.
    """
    target = FOLDER / "+".join(requirements)
    if target.is_dir():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=FOLDER))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-deps", "--target", str(made), *requirements],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        if done.returncode != 0:
            raise UnsupportedError(
                f"expected {', '.join(requirements)} from pip's index, which cannot be reached or "
                f"lacks them; set PIP_INDEX_URL or PIP_FIND_LINKS. pip says: {done.stderr.strip()}"
            )
        if not target.is_dir():
            made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target
