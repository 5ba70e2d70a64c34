"""Simulated engines, and the policy of placement behind them."""

import math
from itertools import pairwise

import pytest
from goodputs import simulated
from goodputs.policies import Adaptive, Replicas
from goodputs.simulator import Hardware, Request, Simulation, Turn

from vllm_commext.bench.workload import MIXED, WORKLOADS, Arrival
from vllm_commext.limits import Limits

LIMITS = Limits(0.015, 1.0)
ONE = (Hardware(),)


class Seen(Replicas):
    def __init__(self, hardware: tuple[Hardware, ...] = ONE) -> None:
        super().__init__(hardware)
        self.times: list[float] = []

    def first(self, request: Request, now: float) -> None:
        self.times.append(now)

    token = first


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    hardware, seen = ONE[0], Seen()
    (request,) = Simulation(ONE, [Arrival(1.0, 4096, 3)], seen).run()
    prompt = hardware.prompt_token * 4096 + hardware.million_pairs * 4096**2 / 2e6
    first = hardware.overhead + 2 * hardware.step + prompt
    assert request.first_token == pytest.approx(first)
    step = hardware.step + hardware.answer + hardware.context_token * 4096
    assert request.per_token == pytest.approx(step, rel=1e-3)
    assert [late - early for early, late in pairwise(seen.times)] == pytest.approx(
        [step, step], rel=1e-3
    )


def test_more_prompts_are_in_time_where_the_longest_are_put_off() -> None:
    known = [Arrival(1.5 * one, 4000, 8) for one in range(4)]
    bunch = [*(Arrival(9 + one / 100, 16000, 1) for one in range(4)), Arrival(9.1, 2000, 1)]

    def num_in_time(is_ordered: bool) -> int:
        policy = Adaptive(ONE, Limits(0.0, 1.0), is_ordered=is_ordered)
        requests = Simulation(ONE, known + bunch, policy).run()
        return sum(one.first_token <= 1.0 for one in requests[len(known) :])

    assert (num_in_time(False), num_in_time(True)) == (1, 3)


def test_engines_that_go_lose_what_has_begun_alone() -> None:
    turns = [Turn(2.0, 0, False), Turn(4.0, 0, True)]
    arrivals = WORKLOADS[MIXED](6.0, 10.0, 5)
    policy = Adaptive(simulated.PAIR, LIMITS, is_ordered=False)
    requests = Simulation(simulated.PAIR, arrivals, policy, turns).run()
    lost = [one for one in requests if math.isinf(one.end)]
    assert all(one.tokens > 0 and one.num_losses == 1 for one in lost)
    assert len(lost) < len(requests) / 4
    assert all(0 not in (one.prefill, one.decode) for one in requests if 2 < one.arrival.at < 4)


def test_many_engines_share_answers() -> None:
    """Eight with documents, of which four that prefill and four that decode have all in time."""
    limits, hardware = Limits(0.012, 1.0), [Hardware()] * 8
    shares: list[float] = []
    for seed in (1, 2, 3):
        arrivals = WORKLOADS["document"](12.8, 16.0, seed)
        requests = Simulation(hardware, arrivals, Adaptive(hardware, limits)).run()
        later = [one for one in requests if one.arrival.at > 6.0]
        shares.append(sum(one.is_good(limits) for one in later) / len(later))
    assert sum(shares) / len(shares) >= 0.93


@pytest.mark.parametrize("seed", [0, 1, 13])
@pytest.mark.parametrize("notice_seconds", [0.0, 0.7])
def test_a_decoding_engine_that_goes_leaves_nothing_at_the_other(
    seed: int, notice_seconds: float
) -> None:
    hardware = [Hardware(cache_tokens=1e5, noise=0.1)] * 2
    turns = [Turn(6.0, 1, False), Turn(9.0, 1, True)]
    policy = Adaptive(hardware, LIMITS, seed == 0)
    arrivals = WORKLOADS[MIXED](8.0, 16.0, seed)
    run = Simulation(hardware, arrivals, policy, turns, notice_seconds)
    requests = run.run()
    assert any(one.num_losses for one in requests)
    for one in requests:
        assert one.tokens == one.arrival.output_tokens or math.isinf(one.end)
    for engine in run.engines:
        assert engine.used == 0
        assert not any((engine.waiting, engine.queue, engine.running, engine.loading))
        assert not any((engine.reading, engine.joining, engine.ending))


@pytest.mark.parametrize(("tpot", "rate"), [(0.012, 7.0), (0.025, 9.0), (0.05, 11.0)])
def test_placed_requests_are_in_time_as_often_as_by_the_better_fixed_way(
    tpot: float, rate: float
) -> None:
    limits = Limits(tpot, 1.0)
    good = {
        name: simulated.share_good(name, MIXED, rate, limits)
        for name in ("replicas", "fixed", "adaptive")
    }
    assert good["adaptive"] >= 0.97 * max(good["replicas"], good["fixed"])
    assert good["adaptive"] >= 0.85
