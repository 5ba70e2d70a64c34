"""The connector's statistics in vLLM's log line and on its /metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

from vllm_commext.nixl import recorder
from vllm_commext.nixl.config import parse_config
from vllm_commext.nixl.engine_facts import keeps_host_copy
from vllm_commext.nixl.first_token import FirstToken
from vllm_commext.nixl.recorder import (
    COUNTERS,
    FAILURE_REASONS,
    HISTOGRAMS,
    STREAMS,
    empty_data,
    is_empty,
    merge,
)
from vllm_commext.nixl.stream.producer import Handover
from vllm_commext.nixl.wire.params import write_place
from vllm_commext.nixl.wire.seal import read_secret

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS_BUCKETS = [
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
]

BY_REASON: dict[str, tuple[str, str, Iterable[str]]] = {
    recorder.FAILURES: ("Loads of KV blocks that failed.", "reason", FAILURE_REASONS),
    recorder.FIRST_TOKENS: (
        "Requests with a remote prefill, by where their first token comes from.",
        *("way", FirstToken),
    ),
    recorder.HANDOVERS: (
        "Requests that are handed over, by chunks or whole, by why.",
        *("way", Handover),
    ),
}
"""Counters with one label more, and its values."""
GAUGES = {
    "transfers_in_flight": "Reads of KV blocks under way.",
    "held_requests": "Prefilled requests whose blocks wait for their readers.",
    "quarantined_blocks": "Blocks kept out of use because a late read may still write to them.",
    STREAMS: "1 where prompts are read while they are computed, 0 where this model's are not, "
    "which is known from the first step on.",
}
PEERS = "peers"
INFO_LABELS = ("host", "port", "seal", STREAMS, "reuse", "releases")


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
        self._labels = labelnames
        gauge = partial(self._make, self._gauge_cls, multiprocess_mode="mostrecent")
        self._histograms = {
            key: self._make(self._histogram_cls, key, text, buckets=_SECONDS_BUCKETS)
            for key, text in HISTOGRAMS.items()
        }
        self._counters = {
            key: self._make(self._counter_cls, key, text) for key, text in COUNTERS.items()
        }
        self._by_reason = {
            key: self._make(self._counter_cls, key, text, label)
            for key, (text, label, _) in BY_REASON.items()
        }
        self._gauges = {key: gauge(key, text) for key, text in GAUGES.items()}
        known = "Prefill workers that this engine's workers know, by state."
        self._peers = gauge(PEERS, known, "state")
        for values in per_engine_labelvalues.values():
            self._show_zeros(values)
        self._show_info(vllm_config, gauge)

    def _make(self, kind: Any, key: str, text: str, *labels: str, **how: Any) -> Any:
        names = [*self._labels, *labels]
        return kind(name=f"vllm:commext_nixl_{key}", documentation=text, labelnames=names, **how)

    def _show_info(self, vllm_config: VllmConfig, gauge: Callable[..., Any]) -> None:
        """Say what each data-parallel rank can and where its side channel is: routers read it."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None  # its connector has these metrics
        config = parse_config(
            transfer.kv_connector_extra_config,
            default_host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            default_port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        )
        streams = config.stream_chunks and not keeps_host_copy(vllm_config, config)
        reuses = config.reuse_blocks and transfer.is_kv_consumer
        secret = read_secret(config.side_channel_secret_file)
        info = gauge(
            "info",
            "Side channels, and whether prompts are read while they are computed (streams), blocks "
            "are on offer (reuse) and prefills are known by keys (releases); always 1.",
            *INFO_LABELS,
        )
        for index, values in self._values.items():
            place = write_place(config.side_channel_host, config.side_channel_port + index, secret)
            self._gauges[STREAMS].labels(*values).set(streams)
            flags = {STREAMS: streams, "reuse": reuses, "releases": True}
            told = {**place, **{name: int(flag) for name, flag in flags.items()}}
            info.labels(*values, *(str(told[name]) for name in INFO_LABELS)).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._values[engine_idx]
        for name, histogram in self._histograms.items():
            for seconds in transfer_stats_data[name]:
                histogram.labels(*values).observe(seconds)
        for name, counter in self._counters.items():
            counter.labels(*values).inc(transfer_stats_data[name])
        for name, counter in self._by_reason.items():
            for reason, count in transfer_stats_data[name].items():
                counter.labels(*values, reason).inc(count)
        self._set_gauges(values, sum_of_sources(transfer_stats_data[recorder.GAUGES]))

    def _set_gauges(self, values: list[object], sums: dict[str, float]) -> None:
        for key, value in sums.items():
            name, _, state = key.partition("/")
            if name == PEERS:
                self._peers.labels(*values, state).set(value)
            else:
                self._gauges[name].labels(*values).set(value)

    def _show_zeros(self, values: list[object]) -> None:
        """Let every series exist from the start, so that a rate over the first event is right."""
        for metric in (
            *self._histograms.values(),
            *self._counters.values(),
            *self._gauges.values(),
        ):
            metric.labels(*values)
        for name, (_, _, reasons) in BY_REASON.items():
            for reason in reasons:
                self._by_reason[name].labels(*values, reason)


def sum_of_sources(sources: dict[str, dict[str, float]]) -> dict[str, float]:
    """Each gauge's sum over the workers and the scheduler side; none where none has changed."""
    sums: dict[str, float] = {}
    for gauges in sources.values():
        for key, value in gauges.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums
