"""A proxy before engines that take either step: where requests go, and what tells of it."""

import asyncio
import time
from typing import Any

import pytest

from vllm_commext.limits import Limits
from vllm_commext.proxy.config import ADAPTIVE
from vllm_commext.proxy.engines.affinity import Prefix
from vllm_commext.proxy.engines.choice import WINDOW, Chooser
from vllm_commext.proxy.engines.engine import BOTH, DECODE, PREFILL, ROLES, Engine, EnginePool
from vllm_commext.proxy.policy.answer_lengths import UNKNOWN_LENGTHS, Lengths
from vllm_commext.proxy.policy.placement import Planner

BODY = {"prompt": "w" * 8000, "max_tokens": 64, "stream": True}
PLACED = "X-Commext-Placement"


def count(metrics: str, name: str, **labels: str) -> float:
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in metrics.splitlines() if line.startswith(name + "_total{")]
    return sum(float(line.split()[-1]) for line in lines if all(one in line for one in wanted))


def know(load: Any, tokens_a_second: float = 4000.0) -> None:
    for tokens in (500, 1000, 2000, 4000) * 8:
        load.speed.note_prefill(tokens, 0.0, tokens / tokens_a_second)
        load.speed.note_steps(1, 2000, 0.01)
        load.shared.lengths.add(100)


def serves(first_seconds: float, gap_seconds: float, num_tokens: int = 8) -> Any:
    """An engine that takes so long for a prompt, and for each token after the first."""

    async def behave(call: Any) -> None:
        params = call.body.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill"):
            await asyncio.sleep(first_seconds)
        if params.get("do_remote_decode"):
            await call.answer(
                200, b'{"choices": [{"text": "!"}], "kv_transfer_params": {"remote_host": "h"}}'
            )
            return
        events = [b'data: {"choices": [{"text": "%d"}]}\n\n' % token for token in range(num_tokens)]
        await call.stream([*events, b"data: [DONE]\n\n"], lambda: asyncio.sleep(gap_seconds))

    return behave


async def test_requests_are_shared_out_among_engines_that_do_both(kit: Any) -> None:
    async with kit.cluster(0, 0, num_both=2, placement="local", affinity=False) as cluster:
        for _ in range(4):
            answer = await cluster.ask(BODY)
            assert answer.headers["X-Commext-Path"] == "local-prefill"
            assert answer.headers[PLACED] == "least_work"
        assert [len(engine.calls) for engine in cluster.both] == [2, 2]
        page = await cluster.metrics()
    assert count(page, "commext_proxy_local_prefills", reason="placement") == 4
    assert count(page, "commext_proxy_placements", kind="least_work") == 4


async def test_an_engine_of_both_roles_is_one_engine(kit: Any) -> None:
    async with kit.cluster(1, 1, num_both=1) as cluster:
        registry, pools = cluster.proxy.registry, cluster.pools
        assert [one.name for one in registry.engines] == ["prefill0", "engine0", "decode0"]
        assert [len(pool.engines) for pool in pools] == [2, 2]
        assert pools[0].engines[1] is pools[1].engines[1]
        assert [one.role for one in registry.engines] == ["prefill", "both", "decode"]


async def test_a_prompt_is_handed_over_where_a_running_answer_would_miss_its_limit(
    kit: Any,
) -> None:
    async with kit.cluster(1, 0, num_both=1, tpot_ms=12, affinity=False) as cluster:
        load = cluster.proxy.registry.engines[1].load
        know(load)
        now = time.monotonic()
        answer = load.expect(2000, 200, now)
        answer.begin(now)
        handed = await cluster.ask(BODY)
        answer.end(now, False)
        assert load.shared.handover.value > 0.0
        alone = await cluster.ask(BODY)
        page = await cluster.metrics()
    assert handed.headers[PLACED].startswith("handed_over; first-token=5")
    assert handed.headers["X-Commext-Prefill"] == "prefill0"
    assert handed.headers["X-Commext-Decode"] == "engine0"
    assert alone.headers[PLACED].startswith("local; ")
    for kind in ("handed_over", "local"):
        assert count(page, "commext_proxy_placements", kind=kind) == 1


@pytest.mark.parametrize("num", [0, 40])
async def test_engines_without_prompts_take_what_is_late_if_few_answers_pay(
    kit: Any, num: int
) -> None:
    async with kit.cluster(0, 0, num_both=12, ttft_ms=1000, tpot_ms=12, affinity=False) as cluster:
        loads = [engine.load for engine in cluster.proxy.registry.engines]
        know(loads[0])
        for load in loads[:-3]:
            load.ask(8000, 0, time.monotonic())
        for load in loads[-3:] * num:
            load.expect(1000, time.monotonic()).begin(time.monotonic())
        headers = (await cluster.ask({**BODY, "prompt": [5] * 2000})).headers
        computes = headers.get("X-Commext-Prefill", headers["X-Commext-Decode"])
        assert (computes in ("engine9", "engine10", "engine11")) is (num == 0)


def fleet(num: int) -> tuple[Chooser, tuple[Engine, ...]]:
    planner = Planner(Limits(1.0, 1.0))
    pools = {role: EnginePool(role, 1 << 20, planner.new_load) for role in ROLES}
    for idx in range(num):
        pools[PREFILL].join(engine := pools[DECODE].add(f"http://{idx}", BOTH))
        engine.state.healthy = True
        know(engine.load)
    return Chooser(ADAPTIVE, planner, pools), pools[DECODE].engines


def test_a_conversation_finds_its_engine_among_more_than_are_compared() -> None:
    (chooser, _), prefix = fleet(3 * WINDOW), Prefix((), 0.0, b"session", 4000)
    first = chooser.plan(prefix, 4000, (), True)
    assert first is not None
    assert first.decode is not None
    first.decode.memory.note(prefix)
    for _ in range(6):
        assert chooser.plan(Prefix(tokens=10), 10, (), True) is not None
        again = chooser.plan(prefix, 4000, (), True)
        assert again is not None
        assert again.decode is first.decode


def test_among_more_prefill_engines_than_are_compared_an_idle_one_and_the_last_one_are() -> None:
    planner = Planner(Limits(1.0, 1.0))
    pools = {role: EnginePool(role, 1 << 20, planner.new_load) for role in ROLES}
    for idx in range(2 + 3 * WINDOW):
        engine = pools[PREFILL if idx > 1 else DECODE].add(f"http://{idx}")
        engine.state.healthy = True
        know(engine.load)
        engine.load.ask(400_000, 0, time.monotonic())
    chooser, prefix = Chooser(ADAPTIVE, planner, pools), Prefix((), 0.0, b"session", 4000)
    idle = pools[PREFILL].engines[7]
    next(iter(idle.load.prompts.jobs)).end(time.monotonic(), False)
    for others in range(3):
        plan = chooser.plan(prefix, 4000, (), True)
        assert plan is not None
        assert plan.prefill is idle
        idle.memory.note(prefix)
        for _ in range(others):
            assert chooser.plan(Prefix(tokens=10), 10, (), True) is not None


@pytest.mark.parametrize("num", [6, 10, 12, 15, 30, 32])
def test_each_engine_begins_a_window_before_any_does_again(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In windows that tile a fleet only the same engines would ever be compared."""
    chooser, engines = fleet(num)
    looked: list[list[object]] = []

    def place(_: Planner, now: float, tokens: int, sources: Any, targets: Any, all: bool) -> None:
        looked.append([one.key for one in targets])

    monkeypatch.setattr(Planner, "place", place)
    for _ in range(num):
        chooser.plan(Prefix(tokens=10), 10, (), True)
    assert {first for first, *_ in looked} == {*engines}
    assert {len({*among}) for among in looked} == {WINDOW}


@pytest.mark.parametrize("far", range(WINDOW, WINDOW + 3))
def test_the_engine_with_the_fewest_answers_of_those_that_follow_is_compared(far: int) -> None:
    chooser, engines = fleet(3 * WINDOW)
    for engine in (*engines[:far], *engines[far + 1 :]):
        for _ in range(40):
            engine.load.expect(4000, time.monotonic()).begin(time.monotonic())
    plan = chooser.plan(Prefix(tokens=10), 10, (), True)
    assert plan is not None
    assert plan.decode is engines[far]


async def test_the_best_of_four_stays_the_best_where_its_first_token_is_late(kit: Any) -> None:
    async with kit.cluster(0, 0, num_both=4, ttft_ms=1, affinity=False) as cluster:
        loads = [engine.load for engine in cluster.proxy.registry.engines]
        know(loads[0])
        for load in loads[:3]:
            load.note_cache(1000, 1000, 1)  # no room
        loads[3].ask(400, 0, time.monotonic())
        assert (await cluster.ask(BODY)).headers["X-Commext-Decode"] == "engine3"


async def test_an_engine_that_says_that_its_cache_is_full_is_avoided(kit: Any) -> None:
    """The wait for room costs more than the steps of one that has computed prompts all the time,
    as it may seem on a busy machine: these are expected to take 20 times as long at most."""
    body = BODY | {"prompt": "w" * 24000}
    options = {"ttft_ms": 60_000, "health_interval_seconds": 0.05, "affinity": False}
    async with kit.cluster(0, 0, num_both=2, **options) as cluster:
        loads = [engine.load for engine in cluster.proxy.registry.engines]
        know(loads[0], 400_000.0)
        for full in (0, 1):
            for idx, engine in enumerate(cluster.both):
                engine.cache = (10000, 0.9 if idx == full else 0.3)
            await kit.until(
                lambda full=full: (
                    loads[full].room_seconds(6000, 0.01) > 0.0
                    and loads[1 - full].room_seconds(6000, 0.01) == 0.0
                ),
                "checks",
            )
            answers = [await cluster.ask(body) for _ in range(4)]
            told = {answer.headers["X-Commext-Decode"] for answer in answers}
            assert told == {f"engine{1 - full}"}
        await cluster.both[0].stop()
        await kit.until(lambda: not loads[0].cache.size, "it to be forgotten")


async def test_speed_is_learned_from_streams_that_pass(kit: Any) -> None:
    async with kit.cluster(0, 0, num_both=1, tpot_ms=1000, affinity=False) as cluster:
        cluster.both[0].behave = serves(0.2, 0.01, 40)
        placed = [(await cluster.ask(BODY)).headers[PLACED] for _ in range(3)]
        load = cluster.proxy.registry.engines[0].load
        speed = load.speed
        assert not load.planned  # as they were sent
        assert 0.2 <= speed.prefill_seconds(2000, 0) < 2.0
        assert 0.01 <= speed.step_seconds(1, 2000) < 0.4
        expected = Lengths((*UNKNOWN_LENGTHS, 40, 40, 40))
        assert load.shared.lengths.mean == expected.mean
        page = await cluster.metrics()
    assert [one.split(";")[0] for one in placed] == ["least_work", "local", "local"]
    for name in ("first_token", "per_token"):
        for kind in ("expected", "real"):
            assert f'placement_{name}_seconds_count{{kind="{kind}"}} 2.0' in page


@pytest.mark.parametrize("placement", ["adaptive", "local"])
async def test_what_is_left_of_two_engines_serves_all(kit: Any, placement: str) -> None:
    async with kit.cluster(0, 0, num_both=2, tpot_ms=1, placement=placement) as cluster:
        for engine in cluster.both:
            engine.behave = serves(0.02, 0.005)
        await asyncio.gather(*(cluster.ask(BODY) for _ in range(4)))
        await cluster.both[1].stop()
        answers = await asyncio.gather(*(cluster.ask(BODY) for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert {answer.headers["X-Commext-Decode"] for answer in answers} == {"engine0"}


@pytest.mark.parametrize(
    ("num_both", "config", "is_read"),
    [
        pytest.param(0, {}, False, id="roles decide"),
        pytest.param(1, {"placement": "local"}, False, id="least work decides"),
        pytest.param(1, {}, True, id="an engine of both roles"),
        pytest.param(0, {"placement": "adaptive"}, True, id="placed by choice"),
        pytest.param(0, {"prompt_order": "shortest"}, True, id="prompts in turn"),
    ],
)
async def test_work_is_followed_where_somebody_asks(
    kit: Any, num_both: int, config: dict[str, str], is_read: bool
) -> None:
    async with kit.cluster(1, 1, num_both=num_both, affinity=False, **config) as cluster:
        for _ in range(3):
            assert (await cluster.ask(BODY)).status == 200
        loads = [one.load for one in cluster.proxy.registry.engines]
    assert any(load.recent.share > 0.0 for load in loads) == is_read
