"""The reduce-RMS op on 2 and on 4 GPUs: a process a rank runs every check, a test reports each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_checks import tell
from vllm_commext.testing.gpu_ranks import Outcome, run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

NUM_GPUS = torch.cuda.device_count()
SCRIPT = Path(__file__).with_name("reduce_rms_ranks.py")
TIMEOUT_SECONDS = 200
CHECKS = (
    *("first_call", "exact", "same_statistics", "special_values", "many_calls", "chained_calls"),
    *("graphs", "pieces", "strides_and_single", "missing_peer", "streams", "create_and_destroy"),
    *("cache", "mismatch", "fallback", "two_groups", "compile", "batch_invariant"),
)

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, this machine has {NUM_GPUS}"),
    pytest.mark.timeout(TIMEOUT_SECONDS + 60),
]


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcome:
    world: int = request.param
    if world > NUM_GPUS:
        pytest.skip(f"needs {world} GPUs, this machine has {NUM_GPUS}")
    return run_ranks(SCRIPT, world, CHECKS, TIMEOUT_SECONDS)


@pytest.mark.parametrize("check", CHECKS)
def test_check(
    outcomes: Outcome, check: str, record_property: Callable[[str, object], None]
) -> None:
    tell(outcomes, check, record_property)
