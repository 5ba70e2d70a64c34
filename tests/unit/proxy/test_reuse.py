"""What engines say of themselves on their metrics pages."""

import asyncio
from typing import Any

import pytest

from vllm_commext.proxy.engines.engine import UNKNOWN, Engine
from vllm_commext.proxy.engines.health_and_metrics import (
    INFO_METRIC,
    STREAMS_METRIC,
    HealthMonitor,
    read_cache,
    read_capabilities,
)

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


CACHE = 'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="%s",engine="0"} 1.0\n'
STEPS = 'vllm:iteration_tokens_total_count{engine="%d",model_name="tiny"} %s\n'
USE = 'vllm:kv_cache_usage_perc{engine="%d",model_name="tiny"} %s\n'


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        pytest.param("", None, id="none"),
        pytest.param(USE % (0, 0.5), None, id="no size"),
        pytest.param(CACHE % 1000, None, id="no use"),
        pytest.param(CACHE % "None" + USE % (0, 0.25), None, id="no cache"),
        pytest.param(CACHE % 1000 + USE % (0, 0.25) + STEPS % (0, 7), (1000, 250, 7), id="one"),
        pytest.param(
            CACHE % 1000 + USE % (0, 0.25) + USE % (1, 0.75) + STEPS % (0, 7) + STEPS % (1, 5),
            (2000, 1000, 12),
            id="two ranks",
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


async def test_an_engine_whose_metrics_cannot_be_had_yet_is_asked_again(kit: Any) -> None:
    async with kit.cluster(health_interval_seconds=0.05) as cluster:
        (engine,) = cluster.decode
        (one,) = cluster.pools[1].engines
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
        (one,) = cluster.pools[1].engines
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
        if engine.role == "decode":
            noticed.set()

    async with kit.cluster(health_interval_seconds=0.05) as cluster:
        (one,) = cluster.pools[1].engines
        monkeypatch.setattr(HealthMonitor, "_learn_page", learn)
        await asyncio.wait_for(noticed.wait(), 10)
        for _ in range(10):
            await asyncio.sleep(0)
        assert one.state.drains_itself
