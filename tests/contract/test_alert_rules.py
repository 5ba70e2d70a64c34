"""The alert rules for Prometheus ask for metrics, labels and values that exist."""

import ast
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_operations import BY, NAME, OTHER_LABELS, PAGE, samples
from vllm_commext.nixl.decode.peers import IDLE_SECONDS, PeerState
from vllm_commext.nixl.recorder import FAILURE_REASONS
from vllm_commext.proxy.session.two_step import LocalPrefill

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "prometheus" / "commext_alerts.yml"
BASE = ROOT / "examples" / "k8s" / "base"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
MATCHER = re.compile(r'(\w+)(=~?|!=)"([^"]+)"')
PROXY = [ast.parse(path.read_text()) for path in (ROOT / "vllm_commext" / "proxy").rglob("*.py")]
VALUES = {
    "vllm:commext_nixl_failures_total": set(FAILURE_REASONS),
    "vllm:commext_nixl_peers": {state.value for state in PeerState},
    "commext_proxy_local_prefills_total": {reason.value for reason in LocalPrefill},
    "commext_proxy_engines_healthy": {"decode"},
    "commext_proxy_requests_total": {
        node.value
        for tree in PROXY
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    },
}
by_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


@by_rule
def test_a_rule_asks_for_what_exists(rule: dict[str, Any]) -> None:
    known = samples()
    names = NAME.findall(rule["expr"])
    assert names
    assert set(names) <= set(known)
    for label, _, values in MATCHER.findall(rule["expr"]):
        assert label in known[names[0]]
        assert set(values.split("|")) <= VALUES[names[0]]
    by = {label.strip() for found in BY.findall(rule["expr"]) for label in found.split(",")}
    assert by <= set.intersection(*(known[name] for name in names)) | OTHER_LABELS


def test_every_reason_of_a_failed_load_has_an_alert() -> None:
    asked = {
        reason
        for rule in RULES
        if "failures_total" in rule["expr"]
        for reason in FAILURE_REASONS
        if asks_for(rule, reason)
    }
    assert asked == set(FAILURE_REASONS)


@by_rule
def test_the_page_has_the_alert(rule: dict[str, Any]) -> None:
    """Those that page at the page's head, the others under Tickets, where the alert links to."""
    head, _, rest = PAGE.partition("### Tickets")
    part, anchor = (head, "") if rule["labels"]["severity"] == "page" else (rest, "#tickets")
    assert f"| `{rule['alert']}` | " in part
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md{anchor}"
    assert rule["annotations"]["description"].endswith(".")


def test_pages_come_before_tickets() -> None:
    severities = [rule["labels"]["severity"] for rule in RULES]
    assert severities == sorted(severities)


@pytest.mark.parametrize("name", ["CommextPeersLost", "CommextPrefillBypassed"])
def test_the_slowest_start_that_the_manifests_allow_raises_no_alert(name: str) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == name)
    deployment = next(yaml.safe_load_all((BASE / "prefill.yaml").read_text()))
    (engine,) = deployment["spec"]["template"]["spec"]["containers"]
    probe = engine["startupProbe"]
    assert (
        int(rule["for"].removesuffix("m")) * 60 > probe["periodSeconds"] * probe["failureThreshold"]
    )


def test_a_prefill_engine_that_was_removed_raises_no_alert() -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "CommextPeersLost")
    minutes = int(rule["for"].removesuffix("m"))
    assert minutes * 60 > IDLE_SECONDS
    assert f"D has not reached a P for {minutes} minutes" in PAGE


def test_promtool_finds_nothing_in_the_rules() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool: apt-get install prometheus brings it")
    command = [program, "check", "rules", FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def asks_for(rule: dict[str, Any], value: str) -> bool:
    """Whether a rule counts series with this value of the label that it matches."""
    matches = MATCHER.findall(rule["expr"])
    return all((value in values.split("|")) != (sign == "!=") for _, sign, values in matches)
