"""Parts that test themselves where vLLM reads otherwise than all that were tested: the all-reduce
and the fused op in compiled models, on 2 GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_checks import checks_in, needs_gpus, tell
from tests.kit.gpu_ranks import Outcome, run_ranks

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

SCRIPT = Path(__file__).with_name("self_test_ranks.py")
SECONDS = 240
CHECKS = checks_in(SCRIPT)

pytestmark = [needs_gpus(2), pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run_ranks(SCRIPT, 2, CHECKS, SECONDS)


@pytest.mark.parametrize("check", CHECKS)
def test_check(
    outcome: Outcome, check: str, record_property: Callable[[str, object], None]
) -> None:
    tell(outcome, check, record_property)
