"""`vllm-commext doctor` beside the installed vLLM: everything that it can find, it finds."""

from collections.abc import Sequence
from pathlib import Path

from tests.contract.vllm_process import run_at_once
from vllm_commext.cli.report import Check, Level, decode
from vllm_commext.compat.parts import PARTS


def check_that_all_is_found(checks: Sequence[Check]) -> None:
    found = {(check.section, check.name): check for check in checks}
    for part in PARTS:
        assert found["parts", part.name].value.startswith("tested: vLLM ")
    assert found["capabilities", "nixl"].value == "active"
    assert "UCX" in found["nixl", "plug-ins that load"].value
    assert Level.ERROR not in {check.level for check in checks}


def test_the_probes_cover_vllm_its_apis_and_nixl(tmp_path: Path) -> None:
    """Those that need libraries, where these have been imported; `test_doctor.py` of the unit tests
    has the others, and the command."""
    files = [tmp_path / name for name in ("vllm", "nixl")]
    programs = [
        {"module": "vllm_commext.cli.checks", "arguments": [file.name, str(file)]} for file in files
    ]
    for done in run_at_once(programs, {}):
        assert done.returncode == 0, done.stderr
    check_that_all_is_found([check for file in files for check in decode(file.read_bytes())])
