"""How many requests could have been in time, had every arrival and length been known: a search over
what is placed where, from the best of the contestants' own placements on. It finds what is
possible, and misses what is better: a lower bound of the optimum.
"""

import random
from collections.abc import Sequence

from goodputs.policies import Silent
from goodputs.simulator import Hardware, Request, Simulation
from vllm_commext.bench.workload import Arrival
from vllm_commext.limits import Limits

MOST_TOGETHER = 8
"""Requests next to one another whose placement is changed at once."""
Places = Sequence[tuple[int, int]]


class Planned(Silent):
    """Each request in the order of arrival where *places* say."""

    def __init__(self, places: Places) -> None:
        self._next = iter(places)

    def place(self, request: Request, now: float) -> tuple[int, int]:
        return next(self._next)


def _lateness(request: Request, limits: Limits) -> float:
    tpot, first = request.per_token / limits.tpot, request.first_token / limits.first
    return max(tpot - 1.0, 0.0) + max(first - 1.0, 0.0)


def best_share(
    hardware: Sequence[Hardware],
    arrivals: Sequence[Arrival],
    limits: Limits,
    starts: Sequence[Places],
    warm_seconds: float,
    num_tries: int,
) -> float:
    """Share of requests after *warm_seconds* in time by the best placement that is found. starts:
    placements to begin with, of which the best is taken; no engine may be lost."""
    counted = sum(one.at >= warm_seconds for one in arrivals)

    def score(places: Places) -> tuple[int, float]:
        requests = Simulation(hardware, arrivals, Planned(places)).run()
        requests = [one for one in requests if one.arrival.at >= warm_seconds]
        lateness = sum(_lateness(one, limits) for one in requests)
        return sum(one.is_good(limits) for one in requests), -lateness

    dice = random.Random(1)
    engines = range(len(hardware))
    choices = [(prefill, decode) for prefill in engines for decode in engines]
    best_score, best = max((score(places), list(places)) for places in starts)
    for _ in range(num_tries):
        if best_score[0] == counted:
            break
        start, size = dice.randrange(len(best)), dice.randint(1, MOST_TOGETHER)
        tried = best.copy()
        tried[start : start + size] = [dice.choice(choices)] * len(tried[start : start + size])
        if (tried_score := score(tried)) > best_score:
            best_score, best = tried_score, tried
    return best_score[0] / max(counted, 1)
