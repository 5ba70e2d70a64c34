"""The connector as vLLM sees it: its interface, what it refuses, its statistics."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_commext.compat import kv_connector
from vllm_commext.errors import ConfigError, UnsupportedError
from vllm_commext.nixl import connector, engine_facts
from vllm_commext.nixl.config import ConnectorConfig, parse_config
from vllm_commext.nixl.connector import CommextNixlConnector
from vllm_commext.nixl.prometheus import CommextNixlStats
from vllm_commext.nixl.recorder import TransferRecorder, empty_data
from vllm_commext.nixl.stream.producer import Handover
from vllm_commext.nixl.vllm_cache import ONE_STAGE, groups_of, needs_zeroed_blocks

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
SLIDING = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=32
)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
CROSS = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
UNIFORM = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL})


def cache_config(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def vllm_config(**extra: Any) -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="CommextNixlConnector",
        kv_connector_module_path="vllm_commext.nixl.connector",
        kv_role="kv_both",
        kv_buffer_device=current_platform.device_type,
        kv_connector_extra_config=extra,
    )
    return VllmConfig(kv_transfer_config=transfer)


def test_the_parallelism_of_a_default_configuration_is_one() -> None:
    sizes = kv_connector.context_parallel_sizes(vllm_config())
    assert set(sizes.values()) == {1}
    for name in sizes:
        assert hasattr(vllm_config().parallel_config, name), name


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_unknown_and_bad_keys_stop_the_engine(role: KVConnectorRole) -> None:
    for extra, word in (({"backend": 1}, "backend"), ({"num_threads": "many"}, "num_threads")):
        with pytest.raises(ConfigError, match=word):
            CommextNixlConnector(vllm_config(**extra), role, cache_config(FULL))


def settings(**extra: Any) -> ConnectorConfig:
    return parse_config(extra, default_host="h", default_port=7000)


@pytest.mark.parametrize(
    "specs", [[FULL], [UNIFORM], [SLIDING], [MAMBA], [FULL, SLIDING], [FULL, MAMBA, MAMBA]]
)
def test_these_caches_are_served(specs: list[Any]) -> None:
    engine_facts.check_supported(vllm_config(), cache_config(*specs), settings())
    assert [group.block_size for group in groups_of(cache_config(*specs))] == [16] * len(specs)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([CROSS], ["CrossAttentionSpec", "NixlConnector"]),
        ([FULL, CROSS], ["CrossAttentionSpec"]),
        ([FULL, dataclasses.replace(MAMBA, mamba_cache_mode="all")], ["keeps others", "'all'"]),
        (
            [FULL, dataclasses.replace(MAMBA, num_speculative_blocks=3)],
            ["one state a request", "--speculative-config"],
        ),
    ],
)
def test_other_caches_are_refused_by_name(specs: list[Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedError) as raised:
        CommextNixlConnector(vllm_config(), KVConnectorRole.SCHEDULER, cache_config(*specs))
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("specs", "extra", "refusal"),
    [
        ([FULL], {}, None),
        ([SLIDING, FULL], {}, None),
        ([MAMBA, SLIDING], {}, Handover.LAYERS),
        ([FULL], {"stream_chunks": False}, Handover.OFF),
        ([FULL], {"host_copy": True}, Handover.HOST_COPY),
        ([FULL, FULL], {"zeroes": True}, Handover.ZEROED),
        ([FULL, MAMBA], {"zeroes": True}, None),
    ],
)
def test_an_engine_that_streams_nothing_says_why(
    monkeypatch: pytest.MonkeyPatch,
    specs: list[Any],
    extra: dict[str, Any],
    refusal: Handover | None,
) -> None:
    config: Any = SimpleNamespace(
        kv_transfer_config=None,
        model_config=SimpleNamespace(max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
    )
    extra = dict(extra)
    zeroes = extra.pop("zeroes", False)
    monkeypatch.setattr(engine_facts, "needs_zeroed_blocks", lambda _: zeroes)
    found = engine_facts.streaming_of(config, cache_config(*specs), settings(**extra))
    assert found.refusal == refusal


def test_states_are_refused_with_speculation_that_keeps_no_state_for_a_draft_token() -> None:
    """As Kimi Linear's under --use-replayssm."""
    config = vllm_config()
    config.speculative_config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=4
    )
    engine_facts.check_supported(config, cache_config(FULL), settings())
    with pytest.raises(UnsupportedError, match="one state a request.*--speculative-config"):
        engine_facts.check_supported(config, cache_config(FULL, MAMBA), settings())


def test_states_are_not_copied_to_the_host() -> None:
    engine_facts.check_supported(vllm_config(), cache_config(FULL), settings(host_copy=True))
    with pytest.raises(UnsupportedError, match="host_copy"):
        engine_facts.check_supported(
            vllm_config(), cache_config(FULL, MAMBA), settings(host_copy=True)
        )


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_other_parallelism_is_refused_by_name(name: str) -> None:
    config = vllm_config()
    setattr(config.parallel_config, name, 2)
    with pytest.raises(UnsupportedError, match=f"{name} > 1 .* got 2"):
        CommextNixlConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def staged(**extra: Any) -> VllmConfig:
    config = vllm_config(**extra)
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "mp"
    return config


def test_pipeline_stages_are_served() -> None:
    engine_facts.check_supported(staged(), cache_config(FULL), settings())


def test_a_worker_of_one_of_several_stages_has_its_place_and_asks_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group="of both")
    monkeypatch.setattr("vllm.distributed.parallel_state.get_pp_group", lambda: group)
    monkeypatch.setattr(connector, "gather_bytes", lambda own, among: [among.encode(), own])
    found = connector.pipeline_of(staged())
    assert (found.size, found.index) == (2, 1)
    assert found.gather(b"ours") == [b"of both", b"ours"]
    assert connector.pipeline_of(vllm_config()) is ONE_STAGE


def test_what_does_not_go_with_pipeline_stages_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="running requests: start without reuse_blocks"):
        CommextNixlConnector(
            staged(reuse_blocks=True), KVConnectorRole.SCHEDULER, cache_config(FULL)
        )
    config = staged()
    config.parallel_config.distributed_executor_backend = "ray"
    with pytest.raises(UnsupportedError, match="executor-backend mp, got 'ray'"):
        CommextNixlConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def model_config(**facts: Any) -> Any:
    """What the connector looks at of a model's configuration."""
    return SimpleNamespace(**{"enable_sleep_mode": False, "multimodal_config": None, **facts})


def test_sleep_mode_is_refused_with_the_reason() -> None:
    config = vllm_config()
    config.model_config = model_config(enable_sleep_mode=True)
    with pytest.raises(UnsupportedError, match="--enable-sleep-mode .*start without it"):
        CommextNixlConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    config.model_config = model_config()
    engine_facts.check_supported(config, cache_config(FULL), settings())


@pytest.mark.parametrize("cache_gb", [0, 4])
@pytest.mark.parametrize("caching", [False, True])
def test_images_that_are_not_hashed_are_refused(cache_gb: int, caching: bool) -> None:
    config = vllm_config()
    multimodal = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config.model_config = model_config(multimodal_config=multimodal)
    config.cache_config.enable_prefix_caching = caching
    if caching or cache_gb:
        engine_facts.check_supported(config, cache_config(FULL), settings())
        return
    with pytest.raises(UnsupportedError, match="numbers images"):
        engine_facts.check_supported(config, cache_config(FULL), settings())


def test_speculation_is_compared_only_where_it_has_a_kv_cache() -> None:
    def fact(method: str, **options: Any) -> str:
        config: Any = SimpleNamespace(speculative_config=SimpleNamespace(method=method, **options))
        return engine_facts._draft_kv_cache(config)

    without: Any = SimpleNamespace(speculative_config=None)
    assert engine_facts._draft_kv_cache(without) == "none"
    real = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    config: Any = SimpleNamespace(speculative_config=real)
    assert engine_facts._draft_kv_cache(config) == "none"
    for method in ("ngram_gpu", "suffix", "medusa", "mlp_speculator"):
        assert fact(method, model="m", num_speculative_tokens=2) == "none"
    eagle = {fact("eagle", model="m", num_speculative_tokens=number) for number in (1, 3)}
    assert eagle == {"eagle/m"}
    assert fact("eagle3", model="m") != fact("eagle", model="m") != fact("eagle", model="n")
    assert fact("custom_class", model="m") != "none"


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_drafts_that_read_far_ahead_are_refused(
    monkeypatch: pytest.MonkeyPatch, num_ahead: int
) -> None:
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", num_ahead, raising=False)
    if num_ahead <= 1:
        engine_facts.check_supported(vllm_config(), cache_config(FULL), settings())
        return
    with pytest.raises(UnsupportedError, match="3 prompt tokens ahead.*num_speculative_tokens 1"):
        CommextNixlConnector(vllm_config(), KVConnectorRole.SCHEDULER, cache_config(FULL))


def test_another_buffer_device_is_refused_with_both_named() -> None:
    config = vllm_config()
    config.kv_transfer_config.kv_buffer_device = "moon"
    with pytest.raises(UnsupportedError, match=f"{current_platform.device_type!r}, got 'moon'"):
        CommextNixlConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def recorded() -> dict[str, Any]:
    recorder = TransferRecorder()
    recorder.observe(handshake_seconds=0.01)
    for _ in range(2):
        recorder.observe(transfer_seconds=0.5, post_seconds=0.02)
        recorder.count(bytes=1000, descriptors=6)
    recorder.observe(queue_seconds=0.03, lease_age_seconds=61.0)
    recorder.count(retries=1, blocks=6, expired_requests=1, side_channel_rejects=7)
    recorder.count(unmatched_notifications=5)
    recorder.count_reason("failures", "timeout")
    taken = recorder.take()
    assert taken is not None
    return taken


def test_statistics_add_up_and_read_back() -> None:
    first = CommextNixlConnector.build_kv_connector_stats(recorded())
    assert isinstance(first, CommextNixlStats)
    total = first.aggregate(CommextNixlStats(recorded()))
    reduced = total.reduce()
    assert reduced["Reads"] == 4
    assert reduced["Avg read (ms)"] == reduced["P90 read (ms)"] == 500.0
    assert reduced["MB read"] == 0.004
    assert reduced["Throughput (MB/s)"] == round(0.004 / 2, 1)
    assert (reduced["Blocks"], reduced["Failures"], reduced["Expired requests"]) == (12, 2, 2)
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert set(total.reduce().values()) == {0}


def metrics_of_two(registry: CollectorRegistry) -> Any:
    """Those of engines 0 and 1."""
    types: dict[Any, Any] = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    labels = {number: ["m", str(number)] for number in (0, 1)}
    return CommextNixlConnector.build_prom_metrics(
        vllm_config(), types, ["model_name", "engine"], labels
    )


def test_metrics_reach_prometheus() -> None:
    registry = CollectorRegistry()
    metrics, labels = metrics_of_two(registry), {"model_name": "m", "engine": "1"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"vllm:commext_nixl_{name}", {**labels, **more})

    assert value("bytes_total") == 0
    assert value("failures_total", reason="timeout") == 0
    metrics.observe(recorded(), engine_idx=1)
    metrics.observe(recorded(), engine_idx=1)
    expected = {
        "transfer_seconds_count": 4,
        "transfer_seconds_sum": 2.0,
        "post_seconds_count": 4,
        "handshake_seconds_count": 2,
        "bytes_total": 4000,
        "blocks_total": 12,
        "descriptors_total": 24,
        "expired_requests_total": 2,
        "unmatched_notifications_total": 10,
        "queue_seconds_count": 2,
        "lease_age_seconds_sum": 122.0,
        "retries_total": 2,
        "side_channel_rejects_total": 14,
    }
    assert {name: value(name) for name in expected} == expected
    assert [value("lease_age_seconds_bucket", le=le) for le in ("30.0", "90.0")] == [0, 2]
    assert value("failures_total", reason="timeout") == 2
    assert value("bytes_total", engine="0") == 0


def test_gauges_add_up_over_workers_and_stay_until_the_next_ones() -> None:
    registry = CollectorRegistry()
    metrics = metrics_of_two(registry)

    def show(engine: int = 0, **sources: dict[str, float]) -> None:
        metrics.observe({**empty_data(), "gauges": sources}, engine_idx=engine)

    def value(name: str, engine: str = "0", **more: str) -> float | None:
        labels = {"model_name": "m", "engine": engine, **more}
        return registry.get_sample_value(f"vllm:commext_nixl_{name}", labels)

    assert value("held_requests") == value("quarantined_blocks") == 0
    reading = {"transfers_in_flight": 2.0, "peers/ready": 1.0}
    show(one=reading, two={**reading, "transfers_in_flight": 3.0}, three={"held_requests": 8.0})
    show(engine=1, one={"held_requests": 9.0})
    show()
    assert value("transfers_in_flight") == 5
    assert value("peers", state="ready") == 2
    assert value("held_requests") == 8
    show(one=reading, two={**reading, "transfers_in_flight": 0.0}, three={"held_requests": 0.0})
    assert value("transfers_in_flight") == 2
    assert value("held_requests") == 0
    assert value("held_requests", "1") == 9
    assert value("streams") == value("streams", "1") == 1  # as configured, until the engine tells
    show(one=reading, three={"streams": 0.0})
    assert (value("streams"), value("streams", "1")) == (0, 1)


def test_both_sides_hold_the_same_of_blocks_that_vllm_zeroes() -> None:
    """A worker knows the types of all layers of a group, the scheduler one of them: DeepSeek V3.2
    has latents and its indexer's bytes in one group."""
    mixed = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.uint8)
    worker = cache_config(
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": mixed})
    )
    scheduler = generate_scheduler_kv_cache_config([worker])
    assert needs_zeroed_blocks(worker) == needs_zeroed_blocks(scheduler)
    assert needs_zeroed_blocks(cache_config(MAMBA, FULL))
