"""`vllm-commext doctor` beside the installed vLLM: everything that it can find, it finds."""

import json
import subprocess
import sys

import pytest

from vllm_commext.compat.api_checks import API_CHECKS
from vllm_commext.compat.parts import PARTS


@pytest.mark.timeout(600)
def test_the_report_covers_vllm_its_apis_and_nixl() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_commext", "doctor", "--json", "--timeout", "450"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    report = json.loads(done.stdout)
    assert done.returncode == report["status"]
    found = {(check["section"], check["name"]): check for check in report["checks"]}
    for part in PARTS:
        assert found["parts", part.name]["value"].startswith("tested: vLLM ")
    for api in API_CHECKS:
        assert found["apis", api.name]["level"] in ("ok", "info")
    assert found["capabilities", "nixl"]["value"] == "active"
    assert "UCX" in found["nixl", "plug-ins that load"]["value"]
    assert "error" not in {check["level"] for check in report["checks"]}
