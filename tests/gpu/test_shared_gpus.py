"""The kernels with more ranks than GPUs: their sums and norms at 2, 3, 4, 5 and 8 ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_checks import checks_in, needs_gpus, tell
from tests.kit.gpu_ranks import run_ranks

SCRIPT = Path(__file__).with_name("shared_gpu_ranks.py")
SECONDS = 120
CHECKS = checks_in(SCRIPT)


@needs_gpus(1)
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_ranks_that_share_gpus_agree_on_every_bit(
    ranks: int, record_property: Callable[[str, object], None]
) -> None:
    outcome = run_ranks(SCRIPT, ranks, CHECKS, SECONDS)
    for check in CHECKS:
        tell(outcome, check, record_property)
        assert outcome.lines[check]["figures"]["batches"] > 0
