"""The all-reduce on 2 and on 4 GPUs: a process a rank runs every check, a test reports each."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_checks import checks_in, needs_gpus

SCRIPT = Path(__file__).with_name("allreduce_ranks.py")
TIMEOUT_SECONDS = 400
CHECKS = checks_in(SCRIPT)

pytestmark = [needs_gpus(2), pytest.mark.timeout(TIMEOUT_SECONDS + 60)]


@pytest.mark.parametrize("check", CHECKS)
def test_check(report: Callable[[str], None], check: str) -> None:
    report(check)
