"""The connector's statistics in vLLM's log line and on its /metrics page."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from vllm_commext.compat.kv_connector import keeps_every_block
from vllm_commext.nixl import recorder
from vllm_commext.nixl.config import parse_config
from vllm_commext.nixl.engine_facts import keeps_host_copy, why_not_reused
from vllm_commext.nixl.first_token import FirstToken
from vllm_commext.nixl.recorder import GAUGES, LABELS, METRICS, STREAMS, empty_data, is_empty, merge
from vllm_commext.nixl.stream.producer import Handover
from vllm_commext.nixl.wire.params import write_place
from vllm_commext.nixl.wire.seal import read_secret

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS_BUCKETS = [
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
    *(90.0, 300.0, 900.0),  # leases may last so long
]

_SHOWN: dict[str, Iterable[str]] = {
    recorder.FAILURES: recorder.FAILURE_REASONS,
    recorder.FIRST_TOKENS: FirstToken,
    recorder.HANDOVERS: Handover,
}
"""Values of counters' labels, which exist from the start."""


class CommextNixlStats(KVConnectorStats):
    """One interval's record; ``data`` is that of ``recorder.empty_data``."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=merge(empty_data(), data or {}))

    def reset(self) -> None:
        self.data = empty_data()

    def aggregate(self, other: KVConnectorStats) -> CommextNixlStats:
        merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return is_empty(self.data)

    def reduce(self) -> dict[str, int | float]:
        seconds = np.asarray(self.data["transfer_seconds"] or [0.0])
        megabytes = self.data["bytes"] / 1e6
        total_seconds = float(seconds.sum())
        return {
            "Reads": len(self.data["transfer_seconds"]),
            "Avg read (ms)": round(float(seconds.mean()) * 1e3, 3),
            "P90 read (ms)": round(float(np.percentile(seconds, 90)) * 1e3, 3),
            "MB read": round(megabytes, 3),
            "Throughput (MB/s)": round(megabytes / total_seconds, 1) if total_seconds else 0.0,
            "Blocks": self.data["blocks"],
            "Failures": sum(self.data[recorder.FAILURES].values()),
            "Expired requests": self.data["expired_requests"],
        }


class CommextNixlPromMetrics(KVConnectorPromMetrics):
    """The metrics ``vllm:commext_nixl_*``, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        make = {
            recorder.HISTOGRAM: partial(self._histogram_cls, buckets=_SECONDS_BUCKETS),
            recorder.COUNTER: self._counter_cls,
            recorder.GAUGE: partial(self._gauge_cls, multiprocess_mode="mostrecent"),
        }
        self._metrics: dict[str, Any] = {
            name: make[kind](
                name=f"vllm:commext_nixl_{name}",
                documentation=text,
                labelnames=[*labelnames, *LABELS.get(name, ())],
            )
            for kind, texts in METRICS.items()
            for name, text in texts.items()
        }
        for values in per_engine_labelvalues.values():
            self._show_zeros(values)
        self._show_info(vllm_config)

    def _show_info(self, vllm_config: VllmConfig) -> None:
        """Say what each data-parallel rank can and where its side channel is: routers read it."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # its connector has these metrics
        config = parse_config(
            transfer.kv_connector_extra_config,
            default_host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            default_port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        )
        streams = config.stream_chunks and not keeps_host_copy(vllm_config, config)
        reuses = why_not_reused(vllm_config, config) is None and keeps_every_block(vllm_config)
        secret = read_secret(config.side_channel_secret_file)
        for index, values in self._values.items():
            place = write_place(config.side_channel_host, config.side_channel_port + index, secret)
            self._metrics[STREAMS].labels(*values).set(streams)
            flags = {STREAMS: streams, "reuse": reuses, "releases": True}
            told = {**place, **{name: int(flag) for name, flag in flags.items()}}
            labels = (str(told[name]) for name in LABELS["info"])
            self._metrics["info"].labels(*values, *labels).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._values[engine_idx]
        for name, metric in self._metrics.items():
            told = transfer_stats_data.get(name)
            if isinstance(told, list):
                for seconds in told:
                    metric.labels(*values).observe(seconds)
            elif isinstance(told, dict):
                for label, count in told.items():
                    metric.labels(*values, label).inc(count)
            elif told:
                metric.labels(*values).inc(told)
        for key, value in sum_of_sources(transfer_stats_data[GAUGES]).items():
            name, *labels = key.split("/")
            self._metrics[name].labels(*values, *labels).set(value)

    def _show_zeros(self, values: list[object]) -> None:
        """Let every series exist from the start, so that a rate over the first event is right."""
        for name, metric in self._metrics.items():
            if name not in LABELS:
                metric.labels(*values)
            for label in _SHOWN.get(name, ()):
                metric.labels(*values, label)


def sum_of_sources(sources: dict[str, dict[str, float]]) -> dict[str, float]:
    """Each gauge's sum over the workers and the scheduler side; none where none has changed."""
    sums: dict[str, float] = {}
    for gauges in sources.values():
        for key, value in gauges.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums
