"""README.md is true of the code."""

import ast
import re

from tests.unit.docs.documents import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FAILURES = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
DEFECTS = (ROOT / "tests" / "cpu" / "test_defects.py").read_text()


def test_each_fault_has_its_row_and_each_row_its_test() -> None:
    anchors = re.findall(r"^\| \[[^]]+\]\(docs/failures\.md#([\w-]+)\)", README, re.MULTILINE)
    named = re.findall(r'^\| <a id="([\w-]+)"></a>.*\| `(test_\w+)` \|$', FAILURES, re.MULTILINE)
    assert anchors
    assert set(anchors) <= {anchor for anchor, _ in named}
    functions = [node for node in ast.parse(DEFECTS).body if isinstance(node, ast.FunctionDef)]
    tests = {node.name for node in functions if node.name.startswith("test_")}
    assert {test for _, test in named} == tests
