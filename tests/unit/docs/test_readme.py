"""README.md is true of the code, and the generated tables are current."""

import ast
import re
import subprocess
import sys

from tests.unit.docs.documents import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FAILURES = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
DEFECTS = (ROOT / "tests" / "cpu" / "test_defects.py").read_text()


def test_the_generated_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"run `make docs`: {done.stdout}{done.stderr}"


def test_each_fault_has_its_row_and_each_row_its_test() -> None:
    anchors = re.findall(r"^\[\w+\]: docs/failures\.md#([\w-]+)$", README, re.MULTILINE)
    named = re.findall(r'^\| <a id="([\w-]+)"></a>.*\| `(test_\w+)` \|$', FAILURES, re.MULTILINE)
    assert anchors
    assert set(anchors) <= {anchor for anchor, _ in named}
    functions = [node for node in ast.parse(DEFECTS).body if isinstance(node, ast.FunctionDef)]
    tests = {node.name for node in functions if node.name.startswith("test_")}
    assert {test for _, test in named} == tests
