"""The kernels with more ranks than GPUs: their sums and norms at 2, 3, 4, 5 and 8 ranks."""

import json
import sys
from pathlib import Path

import pytest

from tests.kit.gpu_checks import needs_gpus
from tests.kit.gpu_ranks import run_ranks

SCRIPT = Path(__file__).with_name("shared_gpu_ranks.py")
SECONDS = 120
CHECKS = ("all_reduce", "fused", "epilogues")


@needs_gpus(2)
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_ranks_that_share_gpus_agree_on_every_bit(ranks: int) -> None:
    outcome = run_ranks(SCRIPT, ranks, CHECKS, SECONDS)
    for check in CHECKS:
        assert check in outcome.lines, f"they ended before {check}:\n{outcome.text[-3000:]}"
        line = outcome.lines[check]
        sys.stdout.write(json.dumps(line) + "\n")
        assert not line["errors"], "\n".join(line["errors"].values())
        assert line["figures"]["batches"] > 0
