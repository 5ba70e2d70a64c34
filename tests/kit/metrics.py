"""A server's Prometheus page as numbers: read it, sum over labels, take the difference of two
readings."""

from __future__ import annotations

import difflib
import functools
import time
from dataclasses import dataclass
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from vllm_commext.errors import ConfigError

POLL_SECONDS = 0.1
Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Metrics:
    """One reading. ``samples``: (name, labels) -> value; ``families``: the names the page
    declares."""

    samples: dict[Key, float]
    families: frozenset[str]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples called ``name`` that carry ``labels``; 0.0 for a declared counter
        without samples.

        Raises ``ConfigError`` when the page does not even declare the name: an absent metric must
        not read as zero."""
        wanted = set(labels.items())
        found = [
            value
            for (sample, has), value in self.samples.items()
            if sample == name and wanted <= has
        ]
        if not found and not self._declares(name):
            near = difflib.get_close_matches(name, self.names(), n=5, cutoff=0.4)
            raise ConfigError(
                f"metrics: expected a metric {name!r}, got a page without it; nearest: {near}"
            )
        return sum(found)

    def names(self) -> list[str]:
        return sorted({name for name, _ in self.samples})

    def minus(self, earlier: Metrics) -> Metrics:
        added = {key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()}
        return Metrics(added, self.families)

    def _declares(self, name: str) -> bool:
        endings = ("", "_total", "_sum", "_count", "_bucket", "_created")
        return any(name == family + ending for family in self.families for ending in endings)


def parse(page: str) -> Metrics:
    """Read a page in Prometheus' text format, of samples without times of their own.

    Of what a sample is called much is the same on each page, and takes its parser 50 ms."""
    samples: dict[Key, float] = {}
    families: set[str] = set()
    for line in page.split("\n"):
        if line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            families.add(name.removesuffix("_total") if kind == "counter" else name)
        elif line and not line.startswith("#"):
            called, value = line.rsplit(" ", 1)
            samples[_key(called)] = float(value)
    return Metrics(samples, frozenset(families))


@functools.cache
def _key(called: str) -> Key:
    (family,) = text_string_to_metric_families(f"{called} 0")
    (sample,) = family.samples
    if sample.timestamp is not None:
        raise ConfigError(f"metrics: expected samples without times, got {called!r}")
    return sample.name, frozenset(sample.labels.items())


def scrape(url: str, timeout_seconds: float = 60.0) -> Metrics:
    with urlopen(f"{url}/metrics", timeout=timeout_seconds) as response:
        return parse(response.read().decode())


def wait_for_added(
    url: str, earlier: Metrics, name: str, at_least: float, seconds: float = 60.0
) -> Metrics:
    """What was added since ``earlier``, as soon as ``name`` has grown by ``at_least``.

    Engines report with a step, so a count may come after the answer that it belongs to. After
    ``seconds`` the last reading is returned whatever it holds: the caller compares it."""
    deadline = time.monotonic() + seconds
    while True:
        added = scrape(url).minus(earlier)
        if added.total(name) >= at_least or time.monotonic() > deadline:
            return added
        time.sleep(POLL_SECONDS)
