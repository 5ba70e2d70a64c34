"""The all-reduce through host memory on GPUs, which ranks share where there are too few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_checks import tell
from vllm_commext.testing.gpu_ranks import Outcome, run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")

NUM_GPUS = torch.cuda.device_count()
SCRIPT = Path(__file__).with_name("host_ranks.py")
TIMEOUT_SECONDS = 200
CHECKS = ("sums", "graphs", "many", "memory")

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 1, reason="this machine has no GPU"),
    pytest.mark.timeout(TIMEOUT_SECONDS + 60),
]


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcome:
    return run_ranks(SCRIPT, request.param, CHECKS, TIMEOUT_SECONDS)


@pytest.mark.parametrize("check", CHECKS)
def test_check(
    outcomes: Outcome, check: str, record_property: Callable[[str, object], None]
) -> None:
    tell(outcomes, check, record_property)
