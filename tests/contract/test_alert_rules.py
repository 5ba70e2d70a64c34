"""The alert rules for Prometheus ask for metrics, labels and values that exist, and fire."""

import ast
import re
import shutil
import subprocess
from collections import defaultdict
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
DOWN, FEWER = "CommextNoProxy", "CommextEngineMissing"
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
# As promtool writes them: a value at the start, and so much more each minute.
SERIES = {
    'vllm:commext_nixl_failures_total{instance="D", reason="timeout"}': "0+1x60",
    'vllm:commext_nixl_failures_total{instance="D", reason="handshake"}': "0+3x60",
    'vllm:commext_nixl_failures_total{instance="D", reason="expired"}': "0+1x60",
    'vllm:commext_nixl_failures_total{instance="D", reason="request"}': "0+6x60",
    'vllm:commext_nixl_first_tokens_total{instance="D", way="prefill"}': "0+10x60",
    'vllm:commext_nixl_quarantined_blocks{instance="D"}': "3+0x60",
    'vllm:commext_nixl_peers{instance="D", state="lost"}': "1+0x60",
    'vllm:commext_nixl_expired_requests_total{instance="P"}': "0+1x60",
    'commext_proxy_engines_healthy{instance="proxy", role="decode"}': "0+0x60",
    'commext_proxy_local_prefills_total{instance="proxy", reason="prefill_away"}': "0+1x60",
    'commext_proxy_requests_total{instance="proxy", outcome="no_engine"}': "0+1x60",
    'commext_proxy_requests_total{instance="proxy", outcome="engine_error"}': "0+1x60",
    'commext_proxy_requests_total{instance="proxy", outcome="ok"}': "0+8x60",
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


def promtool(*arguments: object) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool: apt-get install prometheus brings it")
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_in_the_rules() -> None:
    promtool("check", "rules", FILE)


def run_rules(folder: Path, *tests: dict[str, Any]) -> None:
    """*tests* of ``promtool test rules``, each with its series and alerts."""
    file = folder / "rules_test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "tests": list(tests)}))
    promtool("test", "rules", file)


def test_each_alert_fires_on_what_it_is_for_and_not_before(tmp_path: Path) -> None:
    checks = [
        {"eval_time": time, "alertname": rule["alert"], "exp_alerts": fired}
        for rule in RULES
        for time, fired in (
            ("30s", []),
            ("40m", [] if rule["alert"] in (DOWN, FEWER) else expected(rule)),
        )
    ]
    series = [{"series": name, "values": values} for name, values in SERIES.items()]
    run_rules(tmp_path, {"interval": "1m", "input_series": series, "alert_rule_test": checks})


def test_an_alert_fires_where_no_proxy_is_there(tmp_path: Path) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == DOWN)
    made = {
        "exp_labels": {"role": "decode", **rule["labels"]},
        "exp_annotations": rule["annotations"],
    }
    checks = [{"eval_time": "10m", "alertname": DOWN, "exp_alerts": [made]}]
    run_rules(tmp_path, {"interval": "1m", "alert_rule_test": checks})


def test_a_peer_that_is_lost_and_suspect_by_turns_is_one_peer(tmp_path: Path) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "CommextPeersLost")
    turns = {"lost": "1+0x9 0+0x9 " * 3, "suspect": "0+0x9 1+0x9 " * 3}
    series = [
        {"series": f'vllm:commext_nixl_peers{{instance="D", state="{state}"}}', "values": values}
        for state, values in turns.items()
    ]
    check = {"eval_time": "40m", "alertname": rule["alert"]}
    check["exp_alerts"] = [alert(rule, {"instance": "D"}, ["1+0x9"])]
    run_rules(tmp_path, {"interval": "1m", "input_series": series, "alert_rule_test": [check]})


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("values", "minutes"),
    [
        ("2+0x19 1+0x99", (26, 60)),  # lost at 20 minutes
        ("2+0x19 1+0x2 2+0x99", ()),  # back before a ticket is due
        ("0 1 2+0x99", ()),  # a fleet that starts
    ],
)
def test_an_engine_that_is_missing_raises_a_ticket_for_an_hour(
    tmp_path: Path, role: str, values: str, minutes: tuple[int, ...]
) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == FEWER)
    made = alert(rule, {"instance": "proxy", "role": role}, ["1+0x9"])
    checks = [
        {"eval_time": f"{at}m", "alertname": FEWER, "exp_alerts": [made] * (at in minutes)}
        for at in (10, 23, 26, 60, 85)
    ]
    name = f'commext_proxy_engines_healthy{{instance="proxy", role="{role}"}}'
    series = [{"series": name, "values": values}]
    run_rules(tmp_path, {"interval": "1m", "input_series": series, "alert_rule_test": checks})


@pytest.mark.parametrize(
    ("reason", "percent", "silent"),
    [
        (
            "request",
            1,
            ("CommextLoadsFail", "CommextLoadsFailAfterRestart", "CommextParametersRefused"),
        ),
        ("request", 49, ("CommextLoadsFail", "CommextHandoversRefused")),
        ("timeout", 1, ("CommextLoadsFail",)),
        ("transfer", 19, ("CommextLoadsFail", "CommextFabricFails")),
    ],
)
def test_a_few_failures_that_recompute_has_repaired_page_nobody(
    tmp_path: Path, reason: str, percent: int, silent: tuple[str, ...]
) -> None:
    """Requests with several prompts fail by ``request``, too."""
    counted = {
        f'vllm:commext_nixl_failures_total{{instance="D", reason="{reason}"}}': f"0+{percent}x60",
        'vllm:commext_nixl_first_tokens_total{instance="D", way="prefill"}': "0+100x60",
    }
    series = [{"series": name, "values": values} for name, values in counted.items()]
    checks = [{"eval_time": "40m", "alertname": name, "exp_alerts": []} for name in silent]
    run_rules(tmp_path, {"interval": "1m", "input_series": series, "alert_rule_test": checks})


def kept(labels: dict[str, str], expression: str) -> dict[str, str]:
    """Labels that the result of an expression has: those that it adds up by, else all."""
    by = {label.strip() for found in BY.findall(expression) for label in found.split(",")}
    return {name: value for name, value in labels.items() if name in by or not by}


def asks_for(rule: dict[str, Any], value: str) -> bool:
    """Whether a rule counts series with this value of the label that it matches."""
    matches = MATCHER.findall(rule["expr"])
    return all((value in values.split("|")) != (sign == "!=") for _, sign, values in matches)


def expected(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """The alerts that the series of its metric make."""
    name = NAME.findall(rule["expr"])[0]
    found: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for one, values in SERIES.items():
        labels = dict(re.findall(r'(\w+)="([^"]+)"', one))
        others = set(labels.values()) - {labels["instance"]}
        if one.startswith(name + "{") and all(asks_for(rule, value) for value in others):
            found[tuple(kept(labels, rule["expr"]).items())].append(values)
    assert found, f"no series for {rule['alert']}"
    return [alert(rule, dict(labels), values) for labels, values in found.items()]


def alert(rule: dict[str, Any], labels: dict[str, str], values: list[str]) -> dict[str, Any]:
    """What a rule makes of the series with these labels."""
    summary = rule["annotations"]["summary"].replace("{{ $value }}", values[0].split("+")[0])
    a_minute = sum(int(re.split(r"[+x]", one)[1]) for one in values)  # of 10 in all
    summary = summary.replace("{{ $value | humanizePercentage }}", f"{10 * a_minute}%")
    for label, value in labels.items():
        summary = summary.replace("{{ $labels." + label + " }}", value)
    return {
        "exp_labels": {**labels, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": summary},
    }
