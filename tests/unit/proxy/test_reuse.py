"""Which decode engines a prefill engine is told of, and what it is told."""

import asyncio
import json
from typing import Any

import pytest

from tests.kit.request_bodies import arrived
from vllm_commext.errors import ConfigError
from vllm_commext.proxy.affinity import NO_PREFIX, Prefix, prefix_of
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines import (
    INFO_METRIC,
    MAX_PLACES,
    STREAMS_METRIC,
    UNKNOWN,
    Engine,
    EnginePool,
    places_of,
    read_cache,
    read_capabilities,
)
from vllm_commext.proxy.health import HealthMonitor

BODY = {"model": "tiny", "prompt": "long " * 400, "max_tokens": 3}
FLAGS = 'streams="0",reuse="1",releases="1"'


def row(host: str, port: int, seal: str = "") -> str:
    place = f'host="{host}",port="{port}",seal="{seal}"'
    return f'{INFO_METRIC}{{model_name="tiny",engine="{port - 5600}",{place},{FLAGS}}} 1.0'


def page(*rows: str) -> str:
    return "\n".join(["# HELP other x", "# TYPE other gauge", "other 1.0", *rows, ""])


def test_a_page_names_a_place_for_each_rank() -> None:
    assert not UNKNOWN.is_known
    known = read_capabilities(page(row("d", 5600, "ab"), row("d", 5601)))
    assert known.offers == (
        {"host": "d", "port": 5600, "seal": "ab"},
        {"host": "d", "port": 5601, "seal": ""},
    )
    assert (known.key_ranks, known.streams, known.is_known) == (("0", "1"), False, True)


def test_flags_are_each_ones_own() -> None:
    some = row("d", 5600).replace('streams="0",reuse="1"', 'streams="1",reuse="0"')
    known = read_capabilities(page(some, row("d", 5601)))
    assert (known.streams, len(known.offers)) == (False, 1)
    assert read_capabilities(page(some)).streams


@pytest.mark.parametrize(
    ("engine", "value", "streams"), [(0, 0, False), (0, 1, True), (1, 0, True)]
)
def test_an_engine_whose_model_is_not_streamed_says_so_after_a_step(
    engine: int, value: int, streams: bool
) -> None:
    asked = row("d", 5600).replace('streams="0"', 'streams="1"')
    told = f'{STREAMS_METRIC}{{model_name="tiny",engine="{engine}"}} {value}.0'
    assert read_capabilities(page(asked, told)).streams == streams


CACHE = 'vllm:cache_config_info{block_size="16",%sengine="0",num_gpu_blocks="100"} 1.0\n'
STEPS = 'vllm:iteration_tokens_total_count{engine="%d",model_name="tiny"} %s\n'
USE = 'vllm:kv_cache_usage_perc{engine="%d",model_name="tiny"} %s\n'


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        pytest.param("", None, id="none"),
        pytest.param(USE % (0, 0.5), None, id="no size"),
        pytest.param(CACHE % "", None, id="no use"),
        pytest.param(CACHE % "" + USE % (0, 0.25), (1600, 400, 400), id="blocks"),
        pytest.param(
            CACHE % 'kv_cache_size_tokens="1000",' + USE % (0, 0.25), (1000, 250, 250), id="tokens"
        ),
        pytest.param(
            CACHE % 'kv_cache_size_tokens="1000",' + USE % (0, 0.25) + USE % (1, 0.75),
            (2000, 1000, 1000),
            id="two ranks",
        ),
        pytest.param(
            CACHE % "" + USE % (0, 0.25) + STEPS % (0, 7) + STEPS % (1, 5),
            (1600, 400, 12),
            id="steps",
        ),
    ],
)
def test_an_engine_says_what_its_cache_holds(
    page: str, expected: tuple[float, float, float] | None
) -> None:
    assert read_cache(page) == expected


def test_a_page_without_one_is_known_to_have_none() -> None:
    known = read_capabilities(page())
    assert (known.ranks, known.streams, known.is_known) == ((), False, True)


@pytest.mark.parametrize(
    "broken",
    [
        row("d", 5600).replace("5600", "x"),
        row("d", 5600).replace("seal", "proof"),
        f"{INFO_METRIC}{{no",
    ],
)
def test_a_page_that_cannot_be_read_is_an_error(broken: str) -> None:
    with pytest.raises(ValueError, match=".+"):
        read_capabilities(page(broken))


def prefix(prompt: str) -> Prefix:
    body = arrived({**BODY, "prompt": prompt})
    return prefix_of(body, body["prompt"], None)


def pool_of(*held: str) -> EnginePool:
    """Decode engines that have been asked for so much of the prompt."""
    pool = EnginePool("decode", [f"http://d{n}:1" for n in range(len(held))], 10**6)
    for number, (engine, prompt) in enumerate(zip(pool.engines, held, strict=True)):
        engine.passed_check(rise=1)
        engine.capabilities = read_capabilities(page(row(f"d{number}", 5600)))
        engine.memory.note(prefix(prompt))
    return pool


def hosts(pool: EnginePool, prompt: str = "w" * 8000) -> list[str]:
    return [place["host"] for place in places_of(pool.engines, prefix(prompt))]


def test_who_holds_most_is_named_first_and_who_holds_nothing_not_at_all() -> None:
    pool = pool_of("w" * 2100, "x" * 8000, "w" * 6000)
    assert hosts(pool) == ["d2", "d0"]
    assert places_of(pool.engines, NO_PREFIX) == []


def test_an_engine_that_is_away_or_was_is_not_named() -> None:
    pool = pool_of("w" * 8000, "w" * 4000)
    pool.engines[0].refuse("gone")
    assert hosts(pool) == ["d1"]
    pool.engines[0].passed_check(rise=1)
    assert hosts(pool) == ["d1"]


def test_a_request_names_no_more_than_are_read() -> None:
    assert len(hosts(pool_of(*["w" * 8000] * (MAX_PLACES + 3)))) == MAX_PLACES


def test_without_affinity_nobody_knows_who_holds_what() -> None:
    urls = {"prefill": ("http://p:1",), "decode": ("http://d:1",)}
    with pytest.raises(ConfigError, match="affinity"):
        ProxyConfig(**urls, reuse_blocks=True, affinity=False)


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_second_turn_names_the_engine_of_the_first(kit: Any, is_on: bool) -> None:
    told: list[Any] = []

    async def prefill(call: Any) -> None:
        told.append(call.body["kv_transfer_params"].get("reuse_from"))
        answer = {"choices": [{}], "kv_transfer_params": {"remote_block_ids": [[1]]}}
        await call.answer(200, json.dumps(answer).encode())

    async with kit.cluster(reuse_blocks=is_on) as cluster:
        for engine in cluster.prefill:
            engine.behave = prefill
        for _ in range(2):
            async with cluster.post(BODY) as response:
                assert response.status == 200
                await response.read()
        (used,) = [one for one in cluster.decode if one.calls]
        place = {"host": "127.0.0.1", "port": used.port, "seal": "ab"}
        assert told == [None, [place] if is_on else None]


async def test_an_engine_whose_metrics_cannot_be_had_yet_is_asked_again(kit: Any) -> None:
    async with kit.cluster(reuse_blocks=True, health_interval_seconds=0.05) as cluster:
        (engine,) = cluster.decode
        known = [one for pool in cluster.proxy.pools for one in pool.engines]
        (one,) = [one for one in known if one.url == engine.url]
        engine.metrics_status = 503
        one.capabilities = UNKNOWN
        before = engine.num_scrapes
        await kit.until(lambda: engine.num_scrapes > before + 1, "two more questions")
        assert not one.capabilities.is_known
        engine.metrics_status = 200
        await kit.until(lambda: one.capabilities.is_known, "an answer")
        assert [place["port"] for place in one.capabilities.offers] == [engine.port]


async def test_an_engine_that_comes_back_gets_work_once_it_is_known_what_it_can(kit: Any) -> None:
    async with kit.cluster() as cluster:
        (one,) = cluster.proxy.decode_pool.engines
        one.refuse("it was away")
        assert not one.capabilities.is_known
        async with asyncio.timeout(10):
            while not one.usable:
                await asyncio.sleep(0)
        assert one.capabilities.is_known


async def test_a_drain_that_is_noticed_after_a_check_counts(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is well says so, and drains while it tells what it can."""
    noticed = asyncio.Event()

    async def learn(_: HealthMonitor, engine: Engine) -> None:
        engine.note_drain()
        noticed.set()

    async with kit.cluster(health_interval_seconds=0.05) as cluster:
        (one,) = cluster.proxy.decode_pool.engines
        monkeypatch.setattr(HealthMonitor, "_learn_page", learn)
        async with asyncio.timeout(10):
            await noticed.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert one.drains_itself
