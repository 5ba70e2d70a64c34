"""vLLM with what a later release has announced to take away, or may: each costs the part that needs
it and no other, and no process ends of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from packaging.version import Version

from tests.kit import altered_vllm
from tests.kit.altered_vllm import COSTS, VERSION
from vllm_commext.compat.fits import NEWEST

# A process that imports vLLM takes seconds, and much longer on a busy machine.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        Version(vllm.__version__) < Version(NEWEST), reason="what the newest release has announced"
    ),
]
LOOK = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm_commext import status
from vllm_commext.compat import fits, parts
print(json.dumps({
    "why": {part.name: fits.why_not(part.name) for part in parts.PARTS},
    "states": {one.name: one.state.value for one in status.recorded()},
}))
"""


def look(root: Path) -> tuple[dict[str, dict[str, str]], str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    here = Path(__file__).parents[2]
    environ["PYTHONPATH"] = os.pathsep.join([str(root), str(here)])
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        capture_output=True,
        text=True,
        timeout=400,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_all_of_it_together_costs_those_parts_alone(tmp_path: Path) -> None:
    found, log = look(altered_vllm.make(tmp_path, *COSTS))
    out = {name for name, why in found["why"].items() if why}
    assert out == set().union(*COSTS.values()), found["why"]
    assert found["states"]["nixl"] == "active"
    assert found["states"]["cpu_collectives"] == "active"
    [line] = [line for line in log.splitlines() if "WARNING" in line]
    assert f"no test was run on vLLM {VERSION}" in line


@pytest.mark.parametrize("change", COSTS)
def test_each_change_costs_one_part(tmp_path: Path, change: str) -> None:
    found, _ = look(altered_vllm.make(tmp_path, change))
    assert {name for name, why in found["why"].items() if why} == COSTS[change]


def test_a_release_that_changes_nothing_of_ours_runs_all_parts(tmp_path: Path) -> None:
    found, log = look(altered_vllm.make(tmp_path))
    assert not any(found["why"].values())
    assert "WARNING" not in log
