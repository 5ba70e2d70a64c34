"""Prompts that wait for an engine's turn: which goes first, and that none waits for ever."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.limits import Limits
from vllm_commext.proxy.engines.choice import orders_prompts
from vllm_commext.proxy.engines.engine import Engine
from vllm_commext.proxy.policy.engine_load import EngineLoad, Speeds
from vllm_commext.proxy.policy.prompt_queue import IN_TIME, PATIENCE, SPARED, Queue, Waiting

TOKEN = 25e-6
BOUND_SECONDS = 20.0


def known() -> EngineLoad:
    load = EngineLoad(Speeds())
    for tokens in (500, 1000, 2000, 4000) * 8:
        load.speed.note_prefill(tokens, 0.0, TOKEN * tokens)
        load.speed.note_steps(1, 2000, 0.01)
    return load


class Line:
    """Prompts by their lengths in the order in which they may go."""

    def __init__(self) -> None:
        self.load = known()
        self.turns = Engine("both", "", "", load=self.load).turns
        self.gone: list[int] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def add(self, tokens: int) -> None:
        async def wait() -> None:
            await self.turns.take(tokens, 0)
            self.gone.append(tokens)
            job = self.load.ask(tokens, 0, time.monotonic())
            await asyncio.sleep(TOKEN * tokens)
            job.end(time.monotonic())

        self.tasks[tokens] = asyncio.create_task(wait())
        await asyncio.sleep(0)

    async def ended(self) -> list[int]:
        async with asyncio.timeout(BOUND_SECONDS):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert not self.load.queue
        return self.gone


async def test_a_shorter_prompt_overtakes_longer_ones_that_wait() -> None:
    line = Line()
    for tokens in (12000, 9000, 7000, 500):
        await line.add(tokens)
    assert line.gone == [12000]
    assert len(line.load.queue) == 3
    assert await line.ended() == [12000, 500, 7000, 9000]


async def test_nobody_waits_for_an_idle_engine_or_one_that_is_nearly_done() -> None:
    line = Line()
    for tokens in (400, 300, 200):
        await line.add(tokens)
    assert line.gone == [400, 300, 200]
    await line.ended()


async def test_who_has_just_left_is_passed_over() -> None:
    line = Line()
    for tokens in (12000, 9000, 7000):
        await line.add(tokens)
    first, _, left = line.tasks.values()
    left.cancel()
    first.cancel()
    line.load.end_job(next(iter(line.load.prompts.jobs)), time.monotonic(), False)
    assert await line.ended() == [12000, 9000]


async def test_a_long_prompt_is_overtaken_for_some_times_its_length_alone() -> None:
    line = Line()
    await line.add(8000)
    before = time.monotonic()
    await line.add(2000)
    (waiting,) = line.load.queue
    due, seconds = waiting.due, waiting.seconds
    assert before - 1e-6 <= due - PATIENCE * seconds <= time.monotonic()
    later, _ = line.load.wait_seconds(TOKEN, time.monotonic() + PATIENCE * seconds + 0.2)
    assert later >= seconds  # one that comes then is behind it
    assert line.load.wait_seconds(TOKEN, time.monotonic())[0] < 0.25
    await line.ended()


def test_a_prompt_to_come_waits_for_those_that_are_not_put_off() -> None:
    load = EngineLoad(Speeds(Limits(first=1.0)))
    for seconds in (0.3, 0.5, 0.4):  # of which the second is put off
        load.queue.add(Waiting(10.0, seconds))
    assert load.wait_seconds(0.1, 10.0) == (pytest.approx(0.7), 0)
    assert load.wait_seconds(0.3, 10.0) == (pytest.approx(0.3), 1)  # and the third, for it
    assert load.wait_seconds(0.6, 10.0) == (pytest.approx(1.2), 0)  # that is put off itself


@pytest.mark.parametrize("turn_has_come", [False, True])
async def test_who_leaves_holds_up_nobody(turn_has_come: bool) -> None:
    line = Line()
    for tokens in (4000, 500, 1000):
        await line.add(tokens)
    if turn_has_come:
        (job,) = line.load.prompts.jobs
        job.end(time.monotonic(), False)
    line.tasks[500].cancel()
    assert [tokens for tokens in await line.ended() if tokens != 500] == [4000, 1000]


@pytest.mark.parametrize(
    ("waiting", "limit", "expected"),
    [
        pytest.param([(9.9, 0.5), (9.95, 0.1)], 0.0, 1, id="no limit: the shortest"),
        pytest.param([(9.0, 0.2), (9.95, 0.3)], 0.0, 0, id="no limit: overtaken for long enough"),
        pytest.param([(9.9, 0.5), (9.95, 0.1)], 1.0, 0, id="both in time: as they came"),
        pytest.param([(9.9, 0.8), (9.95, 0.3)], 1.0, 1, id="not both in time: the longest is off"),
        pytest.param([(9.1, 0.8), (9.95, 0.3), (9.96, 0.4)], 1.0, 1, id="it could not be in time"),
        pytest.param([(8.0, 0.8), (8.5, 0.3)], 1.0, 1, id="none in time: the shortest"),
        pytest.param([(5.9, 0.8), (9.95, 0.3)], 1.0, 1, id="put off, while another is in time"),
        pytest.param([(5.9, 0.8), (8.0, 0.9)], 1.0, 0, id="put off, and none is in time"),
    ],
)
def test_the_most_prompts_are_in_time(
    waiting: list[tuple[float, float]], limit: float, expected: int
) -> None:
    line = [Waiting(since, seconds) for since, seconds in waiting]
    assert Queue(limit).next(line, 10.0) is line[expected]


def test_who_is_lost_anyway_goes_after_others_that_can_be_in_time() -> None:
    queue, lost, other = Queue(1.0), Waiting(9.8, 0.1, is_lost=True), Waiting(9.95, 0.3)
    assert queue.next([lost, other], 10.0) is other
    assert queue.next([lost], 10.0) is lost
    assert queue.next([Waiting(8.5, 0.05), lost], 10.0) is lost
    queue.add(lost)
    assert queue.ahead(0.2, 10.0, 10.0) == (0.0, 0)
    queue.add(other)
    assert queue.ahead(0.2, 10.0, 10.0) == (0.3, 0)


async def test_a_prompt_waits_as_lost_whose_first_token_is_expected_too_late(kit: Any) -> None:
    release = asyncio.Event()
    async with kit.cluster(0, 0, num_both=1, ttft_ms=1000, affinity=False) as cluster:
        (engine,), load = cluster.both, cluster.proxy.registry.engines[0].load
        load.speed.note_prefill(2000, 0.0, 0.9)
        load.speed.note_steps(1, 2000, 0.01)
        engine.behave = kit.held(release, kit.prefill_ok)
        asked = list[asyncio.Task[Any]]()
        for length in (8000, 8000, 80):
            asked.append(asyncio.create_task(cluster.ask({"prompt": "a" * length})))
            await kit.until(lambda: cluster.proxy.requests.num_in_flight == len(asked), "its entry")
            await kit.until(lambda: len(engine.calls) + len(load.queue) == len(asked), "its turn")
        assert [one.is_lost for one in load.queue] == [True, False]
        release.set()
        await asyncio.gather(*asked)


def test_who_was_put_off_for_long_gets_its_share_of_the_time() -> None:
    """However many others come, which could all be in time: foreseen as it is done."""
    queue, now, gone = Queue(1.0), 100.0, list[float]()
    for _ in range(3):
        queue.add(Waiting(now - PATIENCE - 0.1, 2.0))
    while len(queue) > 0:
        while len(queue) < 6:
            queue.add(Waiting(now, 0.25))
        chosen = queue.next([*queue], now)
        queue.remove(chosen)
        now += chosen.seconds
        gone.append(chosen.seconds)
        if gone.count(2.0) == 3:
            break
    assert 3 * 2.0 / sum(gone) == pytest.approx(SPARED / (1.0 + SPARED), rel=0.1)


quick = settings(max_examples=50, deadline=None)


def plainly_in_time(line: list[Waiting], now: float, limit: float) -> list[Waiting]:
    """Those that are left when the longest has gone as often as the last one would be late."""
    kept = list[Waiting]()
    for one in line:
        kept.append(one)
        if now + sum(other.seconds for other in kept) > one.since + IN_TIME * limit:
            kept.remove(max(kept, key=lambda other: other.seconds))
    return kept


@quick
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 4, 4, 9, 30])), max_size=20),
    st.integers(1, 30),
    st.integers(40, 99),
)
def test_who_is_put_off_for_a_prompt_is_found_in_one_pass(
    waiting: list[tuple[int, int]], seconds: int, now: int
) -> None:
    """Times are in sixteenths, so that sums are exact."""
    load, own = EngineLoad(Speeds(Limits(0.0, 2.0))), Waiting(now / 16, seconds / 16)
    line = [Waiting(since / 16, each / 16) for since, each in waiting]
    for one in line:
        load.queue.add(one)
    assert load.queue.seconds == sum(one.seconds for one in line)
    for one in line[::3]:
        load.queue.remove(one)
    del line[::3]
    assert load.queue.seconds == sum(one.seconds for one in line)
    kept = plainly_in_time([*line, own], own.since, 2.0)
    expected = sum(one.seconds for one in line), 0
    if own in kept:
        num_put_off = len(plainly_in_time(line, own.since, 2.0)) + 1 - len(kept)
        expected = sum(one.seconds for one in kept) - own.seconds, num_put_off
    assert load.wait_seconds(own.seconds, own.since) == expected


@pytest.mark.parametrize(
    ("options", "num_sent", "last"),
    [
        pytest.param({"prompt_order": "arrival"}, 4, None, id="at once"),
        pytest.param({"prompt_order": "shortest"}, 1, 6000, id="in one line"),
        pytest.param({}, 4, None, id="no limit"),
    ],
)
async def test_prompts_are_sent_in_turn(
    kit: Any, options: dict[str, Any], num_sent: int, last: int | None
) -> None:
    release = asyncio.Event()
    async with kit.cluster(1, 1, affinity=False, **options) as cluster:
        (prefill,) = cluster.prefill
        load = cluster.proxy.registry.engines[0].load
        load.speed.note_prefill(2000, 0.0, 30.0)
        load.speed.note_steps(1, 2000, 0.01)
        prefill.behave = kit.held(release, kit.prefill_ok)
        asked = [
            asyncio.create_task(cluster.ask({"prompt": "a" * length}))
            for length in (8000, 3000, 2000, 6000)
        ]
        await kit.until(lambda: cluster.proxy.requests.num_in_flight == len(asked), "all to be in")
        await kit.until(lambda: len(prefill.calls) >= num_sent, "prompts")
        await asyncio.sleep(0.1)
        assert len(prefill.calls) == num_sent
        release.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * len(asked)
        lengths = [len(call.body["prompt"]) for call in prefill.calls]
        assert last is None or (lengths[0], lengths[-1]) == (8000, last)


@pytest.mark.parametrize(
    ("options", "num_both", "expected"),
    [
        pytest.param({}, 1, False, id="no limit"),
        pytest.param({"tpot_ms": 15.0}, 1, False, id="no limit to the first token"),
        pytest.param({"ttft_ms": 1000.0}, 1, True, id="placed by a limit"),
        pytest.param({"ttft_ms": 1000.0}, 0, False, id="placed by roles"),
        pytest.param({"ttft_ms": 1000.0, "placement": "local"}, 1, False, id="not placed by it"),
        pytest.param({"ttft_ms": 1000.0, "prompt_order": "arrival"}, 1, False, id="told not to"),
        pytest.param({"prompt_order": "shortest"}, 0, True, id="told to"),
    ],
)
async def test_where_prompts_wait_for_their_turn(
    kit: Any, options: dict[str, Any], num_both: int, expected: bool
) -> None:
    async with kit.cluster(1, 1, num_both=num_both, affinity=False, **options) as cluster:
        assert orders_prompts(cluster.proxy.config, cluster.pools[1]) is expected
