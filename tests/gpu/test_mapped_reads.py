"""Reads through mappings of other processes' GPU memory: every byte, and what happens when they
cannot be made or a prefill worker dies."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.gpu_checks import checks_in, needs_gpus, tell
from tests.kit.gpu_ranks import Outcome, run_ranks

SCRIPT = Path(__file__).with_name("mapped_reader.py")
SECONDS = 150
CHECKS = checks_in(SCRIPT)

pytestmark = [needs_gpus(1), pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run_ranks(SCRIPT, 1, CHECKS, SECONDS)


@pytest.mark.parametrize("check", CHECKS)
def test_check(
    outcome: Outcome, check: str, record_property: Callable[[str, object], None]
) -> None:
    tell(outcome, check, record_property)
