"""What the tests of checks that ranks run on GPUs have in common."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_ranks import Outcome

torch = pytest.importorskip("torch", reason="torch is not installed")
NUM_GPUS: int = torch.cuda.device_count()


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips where there are fewer."""
    reason = f"needs {count} GPUs, this machine has {NUM_GPUS}"
    return pytest.mark.skipif(count > NUM_GPUS, reason=reason)


def checks_in(script: Path) -> list[str]:
    """Names of a script's functions ``check_NAME``."""
    return re.findall(r"^def check_(\w+)", script.read_text(), re.MULTILINE)


def tell(outcome: Outcome, check: str, record: Callable[[str, object], None]) -> None:
    """Pass on what the ranks found in one check: its figures, its errors, or why it was skipped."""
    assert check in outcome.lines, f"they ended before this check:\n{outcome.text[-3000:]}"
    line = outcome.lines[check]
    sys.stdout.write(json.dumps(line) + "\n")
    record("figures", line["figures"])
    assert not line["errors"], "\n".join(line["errors"].values())
    if "skipped" in line["figures"]:
        pytest.skip(line["figures"]["skipped"])
