"""What the placement of one request costs the proxy: microseconds among many engines that answer,
best of a hundred, median. No engine runs: `python placing.py`, in the folder benchmarks."""

import argparse
import os
import random
import time

from vllm_commext.limits import Limits
from vllm_commext.proxy.config import ADAPTIVE
from vllm_commext.proxy.engines.affinity import Prefix
from vllm_commext.proxy.engines.choice import Chooser
from vllm_commext.proxy.engines.engine import BOTH, DECODE, PREFILL, ROLES, EnginePool
from vllm_commext.proxy.policy.engine_load import EngineLoad
from vllm_commext.proxy.policy.placement import Planner
from vllm_commext.proxy.policy.prompt_queue import Waiting

LIMITS = Limits(0.015, 1.0)
PROMPT_TOKENS, NUM_ANSWERS = 4000, 8


def _give_work(load: EngineLoad, now: float, most_waiting: int) -> None:
    for tokens in (500, 1000, 2000, 4000):
        load.speed.note_prefill(tokens, tokens**2 / 2e6, 25e-6 * tokens)
    for num in (1, 4, 8):
        load.speed.note_steps(num, PROMPT_TOKENS * num, 0.007 + 5e-5 * num)
    load.note_cache(120_000, 1000, 1)
    for _ in range(NUM_ANSWERS):
        answer = load.expect(PROMPT_TOKENS, now - 1)
        answer.begin(now - 1)
        answer.go_on(random.randint(1, 90), now)
    if random.random() < 0.4:
        load.ask(PROMPT_TOKENS, 0, now)
    for _ in range(random.randint(0, most_waiting)):
        load.queue.add(Waiting(now - random.random(), random.choice((0.02, 0.05, 0.1, 0.3))))


def measure(num_engines: int, num_requests: int, most_waiting: int) -> list[float]:
    """Seconds of each placement, the shortest first: before each, an answer of some engine ends,
    another one begins, and the engine's others get a token."""
    planner, now = Planner(LIMITS), time.monotonic()
    pools = {role: EnginePool(role, 1 << 20, lambda: EngineLoad(planner.shared)) for role in ROLES}
    for idx in range(num_engines):
        engine = pools[DECODE].add(f"http://127.0.0.1:{idx}", BOTH)
        pools[PREFILL].join(engine)
        engine.state.healthy = True
        planner.shared.lengths.add(random.randint(20, 300))
        _give_work(engine.load, now, most_waiting)
    chooser, seconds = Chooser(ADAPTIVE, planner, pools), list[float]()
    prefix = Prefix(tuple(os.urandom(12) for _ in range(15)), 266.0, b"", PROMPT_TOKENS)
    for _ in range(num_requests):
        load, now = random.choice(pools[DECODE].engines).load, time.monotonic()
        next(iter(load.answers)).end(now)
        load.expect(PROMPT_TOKENS, now).begin(now)
        for answer in load.answers:
            answer.go_on(1, now)
        began = time.perf_counter()
        plan = chooser.plan(prefix, PROMPT_TOKENS, (), True)
        seconds.append(time.perf_counter() - began)
        assert plan is not None
        plan.note_sent()
    return sorted(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--requests", type=int, default=4000)
    args = parser.parse_args()
    for most_waiting in (0, 8):
        random.seed(1)
        found = measure(args.engines, args.requests, most_waiting)
        best, median = (found[len(found) // part] * 1e6 for part in (100, 2))
        print(f"{most_waiting} prompts wait at most: {best:.1f} us, median {median:.1f}")


if __name__ == "__main__":
    main()
