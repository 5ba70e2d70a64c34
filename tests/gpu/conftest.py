"""What ranks on GPUs came to, of a test file that names its `SCRIPT`, the `CHECKS` that this is to
run, its `TIMEOUT_SECONDS`, and with `SHARES_GPUS` that ranks need none of their own."""

import sys
from collections.abc import Callable

import pytest

from tests.kit.gpu_ranks import Outcome, run_ranks


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> Outcome:
    from tests.kit.gpu_checks import NUM_GPUS

    module, world = request.module, request.param
    if world > NUM_GPUS and not getattr(module, "SHARES_GPUS", False):
        pytest.skip(f"needs {world} GPUs, this machine has {NUM_GPUS}")
    return run_ranks(module.SCRIPT, world, module.CHECKS, module.TIMEOUT_SECONDS)


@pytest.fixture
def report(
    outcomes: Outcome, record_property: Callable[[str, object], None]
) -> Callable[[str], None]:
    from tests.kit.gpu_checks import tell

    return lambda check: tell(outcomes, check, record_property)


@pytest.fixture
def matrix(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Takes lines that are shown at once, so that a run that is cut off has told what it found."""

    def show(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")
            sys.stdout.flush()

    return show
