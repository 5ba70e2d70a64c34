"""What a person on call relies on: the dashboard's queries, the alert rules' metrics, labels and
values, and the page of metrics and warnings are those of the code."""

import ast
import functools
import inspect
import json
import operator
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.v1.metrics import loggers
from vllm.v1.request import RequestStatus

from tests.contract.arrivals import PROMPT, MakeCore
from tests.contract.scheduled_core import TO_PREFILL, Core, prefilled, request_of, turn_until
from tests.kit.processes import run
from vllm_commext.nixl.decode.peers import IDLE_SECONDS, PeerState
from vllm_commext.nixl.prometheus import CommextNixlPromMetrics
from vllm_commext.nixl.recorder import FAILURE_REASONS
from vllm_commext.proxy.engines.health_and_metrics import read_capabilities
from vllm_commext.proxy.errors_phases import FINE, LocalPrefill
from vllm_commext.proxy.session.prometheus_metrics import ProxyMetrics

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "commext_nixl.json").read_text())
NAME = re.compile(r"(?:vllm:|commext_proxy_)\w+")
OF_VLLM = re.compile(r'_(counter|gauge|histogram)_cls\(\s*name="(vllm:\w+)"')
BY = re.compile(r"by \(([^)]*)\)")
# Set by Prometheus, or a histogram's own.
OTHER_LABELS = {"instance", "le"}
MIN_PHRASE = 12
PLACEHOLDER = re.compile(r"%[-.\d]*[sdgf]")


def registered(config: Any = None, **options: Any) -> CollectorRegistry:
    """What the connector registers under vLLM's configuration, or these settings of its."""
    registry = CollectorRegistry()
    types: dict[Any, Any] = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    config = config or SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=options, is_kv_consumer=True, kv_buffer_device="cpu"
        )
    )
    CommextNixlPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    return registry


@pytest.mark.parametrize(
    ("changes", "value"),
    [({}, True), ({"stream_chunks": False}, False), ({"host_copy": True}, False)],
)
def test_the_page_says_whether_prompts_are_read_while_they_are_computed(
    changes: dict[str, Any], value: bool
) -> None:
    known = read_capabilities(generate_latest(registered(**changes)).decode())
    assert known.streams == value
    [rank] = known.ranks
    assert (rank.number, rank.releases, rank.reuse) == ("0", True, False)


CHUNKS = {"model_config.attention_chunk_size": 64}
OF_MODEL = "model_config._model_info"


@pytest.mark.parametrize(
    ("changes", "reuse"),
    [
        ({}, True),
        ({"speculative_config": SimpleNamespace()}, False),
        ({OF_MODEL: SimpleNamespace(is_hybrid=True)}, False),
        ({OF_MODEL: SimpleNamespace(is_hybrid=False, is_attention_free=True)}, False),
        ({"model_config.hf_text_config.sliding_window": 64}, False),
        (CHUNKS, False),
        ({**CHUNKS, "scheduler_config.disable_hybrid_kv_cache_manager": True}, True),
    ],
)
def test_the_page_says_whether_blocks_are_reused(
    folder: Path, changes: dict[str, Any], reuse: bool
) -> None:
    """Else a move would rely on blocks that are not on offer."""
    config: Any = Core._config(folder, "kv_both", "fail", False, {"reuse_blocks": True})
    for path, value in changes.items():
        of, _, name = path.rpartition(".")
        setattr(operator.attrgetter(of)(config) if of else config, name, value)
    known = read_capabilities(generate_latest(registered(config)).decode())
    assert [rank.reuse for rank in known.ranks] == [reuse]


def families() -> dict[str, tuple[str, set[str]]]:
    """Each family's kind and labels, by name as a page of metrics declares it."""
    registries = registered(), ProxyMetrics([])._registry
    collectors = [one for registry in registries for one in registry._collector_to_names]
    return {one._name: (one._type, set(one._labelnames)) for one in collectors}  # type: ignore[attr-defined]


def of_vllm() -> dict[str, tuple[str, set[str]]]:
    """vLLM's own, but for labels that only one of them has."""
    found = OF_VLLM.findall(inspect.getsource(loggers))
    return {name: (kind, {"model_name", "engine"}) for kind, name in found}


def samples() -> dict[str, set[str]]:
    """Every name that a query can ask for, with its labels."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        name + ending: labels
        for name, (kind, labels) in (families() | of_vllm()).items()
        for ending in endings[kind]
    }


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize("query", queries())
def test_every_query_of_the_dashboard_asks_for_metrics_and_labels_that_exist(query: str) -> None:
    known = samples()
    names = NAME.findall(query)
    assert names
    for name in names:
        assert name in known, name
    wanted = {label.strip() for found in BY.findall(query) for label in found.split(",")}
    held = set.union(*(known[name] for name in names))
    assert wanted <= held | OTHER_LABELS


def test_the_dashboard_shows_every_metric_of_the_connector() -> None:
    shown = {name for query in queries() for name in NAME.findall(query)}
    for name in families():
        if name.startswith("vllm:"):
            assert any(one.startswith(name) for one in shown), name


def test_the_page_has_every_metric_and_no_other() -> None:
    ours, others = (
        {name + "_total" * (kind == "counter") for name, (kind, _) in kinds.items()}
        for kinds in (families(), of_vllm())
    )
    assert set(NAME.findall(re.sub(r"_(bucket|sum)\[", "[", PAGE))) - others == ours


def warnings() -> Iterator[tuple[str, list[str]]]:
    """Where each warning of the connector stands, and the pieces of its text that never change."""
    for path in sorted((ROOT / "vllm_commext" / "nixl").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)):
            nodes = list(ast.walk(function))
            texts = {ast.unparse(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
            for node in (one for one in nodes if isinstance(one, ast.Call)):
                if getattr(node.func, "attr", "") in ("warning", "exception", "error"):
                    told = [texts.get(ast.unparse(one), one) for one in node.args]
                    pieces = [piece for one in told for piece in constants(one)]
                    yield f"{path.name}:{node.lineno}", pieces


def constants(argument: ast.expr) -> Iterator[str]:
    for node in ast.walk(argument):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            pieces = (piece.strip(" :,;.") for piece in PLACEHOLDER.split(node.value))
            yield from (piece for piece in pieces if len(piece) >= MIN_PHRASE)


def test_the_page_has_every_warning() -> None:
    quoted = [line.strip("` :,;.") for line in re.findall(r"`[^`]+`", PAGE)]
    phrases = [phrase for phrase in quoted if len(phrase) >= MIN_PHRASE]
    found = list(warnings())
    assert len(found) >= 15
    for place, pieces in found:
        assert any(phrase in piece for phrase in phrases for piece in pieces), (
            f"{place}: none of {pieces} is in docs/operations.md"
        )


ALERTS = ROOT / "deploy" / "prometheus" / "commext_alerts.yml"
BASE = ROOT / "examples" / "k8s" / "base"
(_GROUP,) = yaml.safe_load(ALERTS.read_text())["groups"]
RULES: list[dict[str, Any]] = _GROUP["rules"]
MATCHER = re.compile(r'(\w+)(=~?|!=|!~)"([^"]+)"')
VALUES = {
    "vllm:commext_nixl_failures_total": set(FAILURE_REASONS),
    "vllm:commext_nixl_peers": {state.value for state in PeerState},
    "commext_proxy_local_prefills_total": {reason.value for reason in LocalPrefill},
    "commext_proxy_engines_healthy": {"decode"},
    "commext_proxy_requests_total": set(FINE),
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


def test_every_outcome_that_is_a_failure_has_an_alert() -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "CommextRequestsFail")
    failed, of_clients = ("outcome", "!~", "|".join(FINE)), ("outcome", "!=", "unauthorized")
    assert MATCHER.findall(rule["expr"]) == [failed, of_clients]


def test_the_manifests_patch_the_alerts_that_they_name() -> None:
    page = (BASE.parent / "README.md").read_text()
    patched = re.findall(r"rules/(\d+)/alert, value: (\w+)", page)
    assert patched
    assert [RULES[int(index)]["alert"] for index, _ in patched] == [name for _, name in patched]


@by_rule
def test_the_page_has_the_alert(rule: dict[str, Any]) -> None:
    """Those that page at the page's head, the others under Tickets, where the alert links to."""
    head, _, rest = PAGE.partition("### Tickets")
    part, anchor = (head, "#watch") if rule["labels"]["severity"] == "page" else (rest, "#tickets")
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


def test_a_prefill_engine_never_looks_hung(make_core: MakeCore, is_async: bool) -> None:
    """Each prompt is a generated token, and what is held, or was aborted, does not run."""
    core = make_core("kv_producer", is_async=is_async)
    core.worker.keeps = True
    prefilled(core, PROMPT)
    assert core.scheduler.requests, "it is held"
    assert (len(core.outputs[-1].new_token_ids), core.num_running) == (1, 0)
    core.add(request_of("aborted", PROMPT[::-1], TO_PREFILL, max_tokens=1))
    turn_until(core, lambda: core.num_running == 1)
    core.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    turn_until(core, lambda: core.num_running == 0)


def test_promtool_finds_nothing_in_the_rules() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool: apt-get install prometheus brings it")
    done = run([program, "check", "rules", ALERTS])
    assert done.returncode == 0, done.stdout + done.stderr


def asks_for(rule: dict[str, Any], value: str) -> bool:
    """Whether a rule counts series with this value of the label that it matches."""
    matches = MATCHER.findall(rule["expr"])
    return all((value in values.split("|")) != (sign == "!=") for _, sign, values in matches)
