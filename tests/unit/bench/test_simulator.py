"""Simulated engines, and the policy of placement behind them."""

import pytest
from goodputs.policies import Adaptive
from goodputs.simulated import CONTESTANTS, Cell
from goodputs.simulator import Hardware, Simulation

from vllm_commext.bench.workload import MIXED, WORKLOADS, Arrival
from vllm_commext.limits import Limits

LIMITS = Limits(0.015, 1.0)
ONE = (Hardware(),)


def test_more_prompts_are_in_time_where_the_longest_are_put_off() -> None:
    known = [Arrival(1.5 * one, 4000, 8) for one in range(4)]
    bunch = [*(Arrival(9 + one / 100, 16000, 1) for one in range(4)), Arrival(9.1, 2000, 1)]

    def num_in_time(is_ordered: bool) -> int:
        policy = Adaptive(ONE, Limits(0.0, 1.0), is_ordered=is_ordered)
        requests = Simulation(ONE, known + bunch, policy).run()
        return sum(one.first_token <= 1.0 for one in requests[len(known) :])

    assert (num_in_time(False), num_in_time(True)) == (1, 3)


@pytest.mark.parametrize(
    ("num", "tpot", "rate", "least"), [(8, 0.012, 12.8, 0.93), (4, 0.01, 10.8, 0.35)]
)
def test_many_engines_share_answers(num: int, tpot: float, rate: float, least: float) -> None:
    """Documents. Of eight, four that prefill and four that decode have all in time. Four can serve
    a half in time, if the others do not take from these."""
    limits, hardware = Limits(tpot, 1.0), [Hardware()] * num
    shares: list[float] = []
    for seed in range(1, 11):
        arrivals = WORKLOADS["document"](rate, 16.0, seed)
        requests = Simulation(hardware, arrivals, Adaptive(hardware, limits)).run()
        later = [one for one in requests if one.arrival.at > 6.0]
        shares.append(sum(one.is_good(limits) for one in later) / len(later))
    assert sum(shares) / len(shares) >= least


@pytest.mark.parametrize(("tpot", "load"), [(0.012, 0.45), (0.025, 0.6), (0.05, 0.75)])
def test_placed_requests_are_in_time_as_often_as_by_the_better_fixed_way(
    tpot: float, load: float
) -> None:
    limits, cells = Limits(tpot, 1.0), [Cell(2, MIXED, load, seed) for seed in range(1, 7)]
    good = {
        name: sum(one.share(CONTESTANTS[name], limits) for one in cells) / len(cells)
        for name in ("replicas", "fixed", "adaptive")
    }
    assert good["adaptive"] >= 0.97 * max(good["replicas"], good["fixed"])
    assert good["adaptive"] >= 0.85
