"""How the tests read a page of metrics."""

import pytest

from tests.kit.metrics import parse
from vllm_commext.errors import ConfigError

prometheus_client = pytest.importorskip("prometheus_client")


def test_a_page_is_read_as_its_parser_reads_it() -> None:
    from prometheus_client import parser

    registry = prometheus_client.CollectorRegistry()
    names = "".join(("a ", '"quoted" ', "{braced} ", "back\\slash ", "two\nlines"))
    for number in range(2):
        counter = prometheus_client.Counter(f"c{number}", names, ["of"], registry=registry)
        counter.labels(names).inc(2.5 + number)
        counter.labels("").inc(1e9)
        histogram = prometheus_client.Histogram(f"h{number}", "text", registry=registry)
        histogram.observe(0.3)
    prometheus_client.Gauge("vllm:g", "text", ["a", "b"], registry=registry).labels(1, 2).set(-1)
    prometheus_client.Gauge("nothing", "text", registry=registry).set(float("inf"))
    prometheus_client.Counter("none_yet", "text", ["of"], registry=registry)
    page = prometheus_client.generate_latest(registry).decode()
    families = list(parser.text_string_to_metric_families(page))
    for _ in range(2):
        found = parse(page)
        assert found.samples == {
            (one.name, frozenset(one.labels.items())): one.value
            for family in families
            for one in family.samples
        }
        assert found.families == {family.name for family in families}
        assert found.total("none_yet_total") == 0
        page = page.replace("2.5", "7.5")
        families = list(parser.text_string_to_metric_families(page))


def test_a_sample_with_a_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="without times"):
        parse("some_name 3.0 1395066363000\n")
