"""What a person on call relies on: the dashboard's queries and the page of metrics and warnings are
those of the code."""

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_commext.nixl.prometheus import CommextNixlPromMetrics
from vllm_commext.proxy.engines.pool import read_capabilities
from vllm_commext.proxy.session.metrics import ProxyMetrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "commext_nixl.json").read_text())
NAME = re.compile(r"(?:vllm:commext|commext_proxy)_\w+")
BY = re.compile(r"by \(([^)]*)\)")
# Set by Prometheus, or a histogram's own.
OTHER_LABELS = {"instance", "le"}
MIN_PHRASE = 12
PLACEHOLDER = re.compile(r"%[-.\d]*[sdgf]")


class Transfer:
    """With every option that adds a metric."""

    kv_connector_extra_config: ClassVar[dict[str, Any]] = {"reuse_blocks": True}
    is_kv_consumer = True
    kv_buffer_device = "cpu"


class Config:
    """As much of vLLM's configuration as the metrics look at."""

    kv_transfer_config = Transfer()


@pytest.mark.parametrize(
    ("changes", "value"),
    [({}, True), ({"stream_chunks": False}, False), ({"host_copy": True}, False)],
)
def test_the_page_says_whether_prompts_are_read_while_they_are_computed(
    changes: dict[str, Any], value: bool
) -> None:
    registry = CollectorRegistry()
    types: dict[Any, Any] = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    config: Any = Config()
    config.kv_transfer_config = Transfer()
    config.kv_transfer_config.kv_connector_extra_config = changes
    CommextNixlPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    known = read_capabilities(generate_latest(registry).decode())
    assert known.streams == value
    [rank] = known.ranks
    assert (rank.number, rank.releases, rank.reuse) == ("0", True, False)


def families() -> dict[str, tuple[str, set[str]]]:
    """Each family's kind and labels, by name as a page of metrics declares it."""
    registry = CollectorRegistry()
    types: dict[Any, Any] = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    config: Any = Config()
    CommextNixlPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    proxy = ProxyMetrics([])
    collectors = [*registry._collector_to_names, *proxy._registry._collector_to_names]
    return {one._name: (one._type, set(one._labelnames)) for one in collectors}  # type: ignore[attr-defined]


def samples() -> dict[str, set[str]]:
    """Every name that a query can ask for, with its labels."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        name + ending: labels
        for name, (kind, labels) in families().items()
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
    kinds = families()
    declared = {name + "_total" * (kind == "counter") for name, (kind, _) in kinds.items()}
    assert set(NAME.findall(PAGE)) - {"commext_nixl"} == declared


def warnings() -> Iterator[tuple[str, list[str]]]:
    """Where each warning of the connector stands, and the pieces of its text that never change."""
    for path in sorted((ROOT / "vllm_commext" / "nixl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in ("warning", "exception", "error"):
                    continue
                pieces = [piece for argument in node.args for piece in constants(argument)]
                fixed = [piece for piece in pieces if len(piece) >= MIN_PHRASE]
                if fixed:
                    yield f"{path.name}:{node.lineno}", fixed


def constants(argument: ast.expr) -> Iterator[str]:
    for node in ast.walk(argument):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (piece.strip(" :,;.") for piece in PLACEHOLDER.split(node.value))


def test_the_page_has_every_warning() -> None:
    quoted = [line.strip("` :,;.") for line in re.findall(r"`[^`]+`", PAGE)]
    phrases = [phrase for phrase in quoted if len(phrase) >= MIN_PHRASE]
    found = list(warnings())
    assert len(found) >= 15
    for place, pieces in found:
        assert any(phrase in piece for phrase in phrases for piece in pieces), (
            f"{place}: none of {pieces} is in docs/operations.md"
        )
