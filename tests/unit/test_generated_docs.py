"""The generated pages are what the code says, and rules.yaml what the alert rules say."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate_docs.py"


def test_the_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"run python tools/generate_docs.py: {done.stdout}{done.stderr}"
