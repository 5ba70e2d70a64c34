"""The all-reduce through host memory on GPUs, which ranks share where there are too few."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_checks import needs_gpus

SCRIPT = Path(__file__).with_name("host_ranks.py")
TIMEOUT_SECONDS = 200
CHECKS = ("sums", "graphs", "many", "memory")
SHARES_GPUS = True

pytestmark = [needs_gpus(1), pytest.mark.timeout(TIMEOUT_SECONDS + 60)]


@pytest.mark.parametrize("check", CHECKS)
def test_check(report: Callable[[str], None], check: str) -> None:
    report(check)
