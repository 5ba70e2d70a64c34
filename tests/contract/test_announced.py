"""vLLM with what a later release has announced to take away, or may: each costs the part that needs
it and no other, and no process ends of it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import vllm
from packaging.version import Version

from tests.kit.untested import VERSION
from vllm_commext.compat.fits import NEWEST

# A process that imports vLLM takes seconds, and much longer on a busy machine.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        Version(vllm.__version__) < Version(NEWEST), reason="what the newest release has announced"
    ),
]
# Each change, as replacements in all of vLLM's text, with the part that cannot do without what it
# takes away.
IR = r"\bvllm\.ir\b", r"^(\s*from vllm import .*)\bir\b"
CHANGES: Mapping[str, tuple[Mapping[str, str], set[str]]] = {
    "vLLM IR goes": ({IR[0]: "vllm.irs", IR[1]: r"\1irs as ir"}, {"fused_norm"}),
    "states have other fields": (
        {r"\bmamba_type\b": "state_type", r"\bmamba_cache_mode\b": "state_cache_mode"},
        {"nixl states"},
    ),
    "the engine's step": ({r"\b_process_engine_step\b": "_take_a_step"}, {"engine step"}),
    "blocks are given up": ({r"\bunpin_blocks\b": "give_up_blocks"}, {"nixl reuse"}),
    "pauses": ({r"\bPauseState\b": "PauseMode"}, {"nixl first token", "pauses"}),
    "queues": ({r"\bwait_until_ready\b": "wait_for_the_others"}, {"shm_queue"}),
    "the communicator": ({r"\bCudaCommunicator\b": "GpuCommunicator"}, {"allreduce"}),
}
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


def altered(folder: Path, changes: Mapping[str, str]) -> None:
    """A copy of the installed vLLM. Names are replaced in all of it at once, so that it works as
    before under the new ones; what asks for an old name finds nothing."""
    target = folder / "vllm"
    aside = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(vllm.__file__).parent, target, copy_function=os.symlink, ignore=aside)
    for path in target.rglob("*.py"):
        before = after = path.read_text(encoding="utf-8")
        for old, new in changes.items():
            after = re.sub(old, new, after, flags=re.M)
        if after != before:
            path.unlink()
            path.write_text(after, encoding="utf-8")
    if IR[0] in changes:
        (target / "ir").rename(target / "irs")
    numbers = f"__version__ = version = '{VERSION}'\n__version_tuple__ = version_tuple = (0, 34, 0)"
    (target / "_version.py").unlink()
    (target / "_version.py").write_text(f"{numbers}\n__commit_id__ = commit_id = None\n")


@pytest.mark.parametrize("names", [[*CHANGES], *([one] for one in CHANGES), []], ids=",".join)
def test_a_change_costs_the_parts_that_need_what_it_takes_away(
    tmp_path: Path, names: list[str]
) -> None:
    wanted: dict[str, str] = {}
    for name in names:
        wanted |= CHANGES[name][0]
    altered(tmp_path, wanted)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    out = {name for name, why in found["why"].items() if why}
    assert out == set().union(*(CHANGES[name][1] for name in names)), found["why"]
    assert found["states"]["nixl"] == found["states"]["cpu_collectives"] == "active"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line]
    assert len(names) == 1 or len(lines) == bool(names)
    assert all(f"no test was run on vLLM {VERSION}" in line for line in lines)
