"""The policy of placement: which engines, with what is known of them."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.limits import Limits
from vllm_commext.proxy.policy.answer_lengths import Lengths
from vllm_commext.proxy.policy.engine_load import Answer, EngineLoad, Speeds
from vllm_commext.proxy.policy.engine_speed import EngineSpeed
from vllm_commext.proxy.policy.placement import (
    BY_ANSWER,
    BY_BOTH,
    BY_PROMPT,
    MAX_SEEN,
    OTHERS_MISSED,
    Candidate,
    Planner,
    Way,
    _Costs,
)
from vllm_commext.proxy.policy.prompt_queue import Waiting

NOW = 100.0
STEP = 0.007
TOKEN = 25e-6
quick = settings(max_examples=60, deadline=None)


def planner(first_token: float = 0.0, per_token: float = 0.0, answer_tokens: int = 160) -> Planner:
    """One that has seen engines of a step of `STEP` and of `TOKEN` for each of a prompt."""
    made = Planner(Limits(per_token, first_token))
    made.shared.lengths = Lengths(())
    speed = EngineSpeed(made.shared)
    for tokens in (500, 4000, 1000, 8000, 2000, 500, 4000, 1000, 8000, 2000) * 3:
        speed.note_prefill(tokens, 0.0, TOKEN * tokens)
        speed.note_steps(4, 16000, STEP)
        made.shared.lengths.add(answer_tokens)
        made.shared.handover.add(0.01)
        made.shared.second_token.add(0.01)
    return made


def engines(of: Planner, count: int = 2) -> list[Candidate]:
    return [Candidate(EngineLoad(of.shared), key=idx) for idx in range(count)]


def running(load: EngineLoad, tokens: int, seconds: float) -> None:
    """Have an answer run that has had *tokens* in *seconds*."""
    answer = load.expect(1000, NOW - seconds)
    answer.begin(NOW - seconds)
    answer.go_on(tokens - 1, NOW)


def place(of: Planner, prefill: list[Candidate], decode: list[Candidate]) -> Way:
    placed = of.place(NOW, 4000, prefill, decode)
    assert placed is not None
    return placed


def test_nothing_is_placed_before_anything_is_known() -> None:
    made = Planner(Limits(0.01, 1.0))
    both = engines(made)
    assert made.place(NOW, 4000, both, both) is None
    assert planner().place(NOW, 4000, [], []) is None


def test_an_engine_that_is_flooded_from_the_start_is_placed_by_its_prompts() -> None:
    """No step is seen where prompts are computed all the time."""
    made = Planner(Limits(0.01, 1.0))
    both = engines(made)
    jobs = [both[0].load.ask(4000, 0, NOW) for _ in range(9)]
    jobs[0].end(NOW + 0.1)
    both[0].load.expect(4000, NOW).begin(NOW + 0.1)
    assert not both[0].load.speed.knows_steps
    placed = made.place(NOW + 0.2, 4000, both, both)
    assert placed is not None
    assert placed.decode is both[1]


def test_a_pause_is_no_part_of_an_engines_recent_time() -> None:
    load = EngineLoad(planner().shared)
    answer = load.expect(1000, NOW)
    load.ask(4000, 0, NOW).end(NOW + 5.0)
    answer.end(NOW + 10.0)
    busy = load.recent.share
    load.look(NOW + 500.0)
    assert load.recent.share == busy > 0.0
    load.expect(1000, NOW + 500.0)
    load.look(NOW + 520.0)
    assert load.recent.share < busy / 5


def test_two_requests_may_come_at_the_same_time() -> None:
    load = EngineLoad(planner().shared)
    load.ask(4000, 0, 0.0)
    load.look(1e-300)
    assert load.recent.share == pytest.approx(1.0)


def test_an_engine_that_is_new_is_known_by_what_it_has_done_so_far() -> None:
    load = EngineLoad(planner().shared)
    load.look(NOW)
    for _ in range(4):
        load.expect(1000, NOW)
    load.ask(4000, 0, NOW).end(NOW + 0.5)
    load.look(NOW + 1.0)
    assert load.recent.share == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("busy", [0, 1])
def test_without_a_limit_the_engine_with_the_least_work_takes_both_steps(busy: int) -> None:
    made = planner()
    both = engines(made)
    both[busy].load.ask(8000, 0, NOW)
    placed = place(made, both, both)
    assert placed.is_local
    assert placed.decode.key == 1 - busy
    assert placed.first_token == pytest.approx(4000 * TOKEN, rel=0.1)


@pytest.mark.parametrize(
    ("tokens_so_far", "seconds", "per_token", "is_local"),
    [
        pytest.param(100, 100 * STEP, 0.02, True, id="slack for the prompt"),
        pytest.param(100, 100 * STEP, 0.0075, False, id="too little of it"),
        pytest.param(100, 3.0, 0.0075, True, id="late already"),
        pytest.param(100, 1.4, 0.012, False, id="little left of much"),
    ],
)
def test_a_prompt_is_handed_over_where_a_running_answer_would_come_late(
    tokens_so_far: int, seconds: float, per_token: float, is_local: bool
) -> None:
    made = planner(per_token=per_token)
    source, target = engines(made)
    running(target.load, tokens_so_far, seconds)
    placed = place(made, [source, target], [target])
    assert placed.is_local == is_local
    assert placed.decode is target
    if not is_local:
        assert placed.prefill is source
        assert placed.per_token == pytest.approx(STEP, rel=0.1)
        assert placed.first_token == pytest.approx(4000 * TOKEN + 0.01, rel=0.1)


def test_a_limit_to_the_first_token_outweighs_an_answer_that_may_be_late_no_more() -> None:
    """A prefill engine with a queue is no way out; with more, or if one is late for sure, it is."""
    cases = (0, 0.009, True), (1, 0.009, True), (4, 0.009, False), (1, 0.008, False)
    for num_running, limit, is_local in cases:
        source, target = engines(made := planner(first_token=0.5, per_token=limit))
        source.load.ask(40000, 0, NOW - 0.1)
        for _ in range(num_running):
            running(target.load, 100, 100 * limit)
        assert place(made, [source], [target]).is_local == is_local


@pytest.mark.parametrize(
    ("queue", "tokens", "is_late"), [(0, 4000, False), (16000, 4000, False), (20000, 4000, True)]
)
def test_a_first_token_is_late_after_its_limit(queue: int, tokens: int, is_late: bool) -> None:
    made = planner(first_token=0.5)
    (engine,) = engines(made, 1)
    if queue:
        engine.load.ask(queue, 0, NOW)
    placed = made.place(NOW, tokens, [], [engine])
    assert placed is not None
    assert placed.is_late == is_late


@pytest.mark.parametrize(
    ("held", "num_running", "prefill", "decode"),
    [
        pytest.param(3900, 1, 1, 1, id="little is new"),
        pytest.param(1000, 1, 0, 0, id="much is new, and nothing runs elsewhere"),
        pytest.param(1000, 0, 1, 1, id="much is new, and nothing runs there"),
    ],
)
def test_a_turn_is_computed_where_its_history_is_while_there_is_slack(
    held: int, num_running: int, prefill: int, decode: int
) -> None:
    made = planner(per_token=0.0075)
    both = engines(made)
    both[1].held_tokens = held
    for _ in range(num_running):
        running(both[1].load, 100, 100 * STEP)
    placed = place(made, both, both)
    assert (placed.prefill.key, placed.decode.key) == (prefill, decode)


def test_an_engine_whose_cache_is_full_costs_what_waiting_there_costs() -> None:
    made = planner(first_token=1.0, per_token=0.02)
    both = engines(made)
    for tokens, used, chosen in ((0, 0, 0), (20000, 16500, 1), (20000, 15000, 0)):
        both[0].load.note_cache(tokens, used, used)
        assert place(made, both, both).decode.key == chosen
    both[0].load.note_cache(20000, 19000, 19000)
    both[1].load.note_cache(20000, 19900, 19900)
    placed = place(made, both, both)
    life = 160 * STEP
    assert placed.first_token == pytest.approx(life * 3160 / 19000 + 4000 * TOKEN, rel=0.1)


def test_a_cache_is_as_full_as_its_engine_says_and_what_was_sent_since() -> None:
    load = EngineLoad(planner().shared)

    def room(tokens: int) -> float:
        return load.room_seconds(tokens, STEP)

    assert room(10**9) == 0.0  # it has not said how large it is
    load.note_cache(10000, 2000, 1)
    assert room(8000) == 0.0 < room(8001)
    answer = load.expect(3000, NOW)
    load.note_cache(10000, 5000, 2)  # the answer's prompt among them
    assert room(5000 - 80) == 0.0 < room(5001 - 80)
    answer.begin(NOW)
    answer.go_on(20, NOW + 1)
    assert room(5000 - 100) == 0.0 < room(5001 - 100)
    answer.end(NOW + 2)
    assert room(8000) == 0.0 < room(8001)
    load.note_cache(10000, 5000, 3)  # what others have
    assert room(5000) == 0.0 < room(5001)
    load.note_cache(10000, 5000, 3)  # it takes no steps
    assert room(10000) == 0.0


def test_a_prompt_fills_its_engines_cache_until_it_is_read() -> None:
    made = planner()
    source, target = (EngineLoad(made.shared) for _ in range(2))
    for load in (source, target):
        load.note_cache(10000, 0, 0)
    job = source.ask(6000, 1000, NOW)
    answer = target.expect(7000, NOW, is_loading=True)
    job.end(NOW + 0.1)
    job.keep()
    answer.source = job
    for load in (source, target):
        assert load.room_seconds(3001, STEP) > 0.0
    answer.begin(NOW + 0.2)
    assert source.room_seconds(3001, STEP) > 0.0
    answer.go_on(1, NOW + 0.3)
    assert source.room_seconds(10000, STEP) == 0.0
    answer.end(NOW + 0.4)
    assert source.cache.unread == target.answers.context == target.answers.coming == 0


def test_what_nobody_reads_leaves_its_engines_cache() -> None:
    load = EngineLoad(planner().shared)
    job = load.ask(6000, 0, NOW)
    job.end(NOW)
    job.read()
    assert load.cache.unread == 0
    job.keep()
    job.read()
    job.read()
    assert load.cache.unread == 0


def plainly_late(at: _Costs, by: int, seen: int) -> float:
    """How many answers come late: of each looked at, its share with what is new, less without."""
    load, shared = at.candidate.load, at.candidate.load.shared
    answers, limit, ended = list(load.answers), shared.limits.tpot, shared.lengths.ended
    stride = math.ceil(len(answers) / seen) or 1

    def late(answer: Answer, is_slower: bool, is_behind: bool) -> float:
        """Limit times tokens, less the time to these: late where it is below zero."""
        step = at.steps.slower if is_slower else at.steps.step
        had = answer.tokens or 1
        until, wait = max(0.0, answer.first_at - NOW), at.backlog + at.prefill * is_behind
        spent = limit + (NOW - answer.first_at if answer.has_begun and not until else 0.0)
        left, used = limit - step, spent + max(0.0, wait - until) - had * step
        if left == 0.0 or used / left <= 0.0:  # whatever its length is
            return float(used > 0.0 or left < 0.0 == used)
        return ended(used / left, had) if left > 0.0 else 1.0 - ended(used / left, had)

    def more(answer: Answer) -> float:
        is_slower, is_behind = bool(by & BY_ANSWER), bool(by & BY_PROMPT)
        already = late(answer, False, False)
        return late(answer, is_slower, is_behind) - already if already < 1.0 else 0.0

    return stride * sum(map(more, answers[::stride]))


def plainly(
    of: Planner, prefill: list[Candidate], decode: list[Candidate]
) -> tuple[object, object]:
    """The best placement, with each one's costs worked out to the end."""
    sources = prefill if of.shared.limits.tpot else []
    seen = max(2, MAX_SEEN // len({one.key for one in (*prefill, *decode)}))
    pairs = [(one, one) for one in decode] + [(p, d) for p in sources for d in decode if p != d]
    made = {one.key: _Costs(one, 4000, NOW) for one in (*prefill, *decode)}
    options = of._options([made[p.key] for p in sources], [made[d.key] for d in decode])

    def cost(idx: int) -> float:
        total, source, at, _, _ = options[idx]
        assert (source.candidate, at.candidate) == pairs[idx]
        if source is at:
            return total + OTHERS_MISSED * max(0.0, plainly_late(at, BY_BOTH, seen))
        late = plainly_late(source, BY_PROMPT, seen) + plainly_late(at, BY_ANSWER, seen)
        return total + OTHERS_MISSED * max(0.0, late)

    source, at = pairs[min(range(len(pairs)), key=cost)]
    return source.key, at.key


def give_work(load: EngineLoad, rng: random.Random) -> None:
    """Some of all that an engine may have to do."""
    for _ in range(rng.choice((0, 0, 1, 3))):
        load.ask(rng.randint(100, 9000), 0, NOW)
    for _ in range(rng.choice((0, 0, 2, 5))):
        load.queue.add(Waiting(NOW - rng.random(), rng.choice((0.02, 0.1, 0.3))))
    for _ in range(rng.choice((0, 2, 4, 8, 20))):
        tokens = rng.randint(2, 150) if rng.random() < 0.95 else 40_000
        running(load, tokens, tokens * STEP * rng.uniform(0.8, 1.1))
    for _ in range(rng.choice((0, 0, 2))):
        load.expect(1000, NOW + rng.uniform(-0.1, 0.1))


def test_what_cannot_win_is_left_out_and_the_best_is_found() -> None:
    num_pairs = 0
    for seed in range(600):
        rng = random.Random(seed)
        made = planner(rng.choice((0.0, 0.3, 2.0)), rng.choice((0.0, 0.0072, 0.0075, 0.008, 0.02)))
        both = engines(made, rng.randint(1, 12))
        slope = rng.choice((0.0, 2e-5, 2e-4))
        twins = rng.random() < 0.3  # of equals the first is taken
        for idx, candidate in enumerate(both):
            load, work_seed = candidate.load, seed if twins and idx % 2 else rng.random()
            for num in (1, 4, 8):
                load.speed.note_steps(num, 4000 * num, STEP + slope * num)
            candidate.held_tokens = rng.choice((0, 0, 1000, 3900))
            give_work(load, random.Random(work_seed))
            load.look(NOW)
            load.recent.share = rng.choice((0.0, 0.2, 0.6))
        prefill = both if rng.random() < 0.6 else both[: rng.randint(1, len(both))]
        decode = both if rng.random() < 0.8 else both[-rng.randint(1, len(both)) :]
        expected = plainly(made, prefill, decode)
        placed = place(made, prefill, decode)
        assert (placed.prefill.key, placed.decode.key) == expected, seed
        assert placed.is_local == (expected[0] == expected[1])
        assert math.isfinite(placed.first_token + placed.per_token)
        num_pairs += not placed.is_local
    assert num_pairs > 20


@quick
@given(st.lists(st.integers(1, 16000), max_size=8), st.integers(1, 16000))
def test_a_longer_queue_is_a_later_first_token(queue: list[int], one_more: int) -> None:
    made = planner()
    (engine,) = engines(made, 1)
    for tokens in queue:
        engine.load.ask(tokens, 0, NOW)
    before = place(made, [], [engine]).first_token
    engine.load.ask(one_more, 0, NOW)
    assert place(made, [], [engine]).first_token > before
    assert engine.load.backlog(NOW + 1e6) >= 0.0


def test_a_prompt_that_nobody_sees_end_is_taken_to_end_in_time() -> None:
    made = planner()
    load = EngineLoad(made.shared)
    load.ask(4000, 0, NOW, is_seen=False)
    load.ask(8000, 0, NOW, is_seen=False)
    assert load.backlog(NOW) == pytest.approx(12000 * TOKEN, rel=0.1)
    assert load.backlog(NOW + 6000 * TOKEN) == pytest.approx(6000 * TOKEN, rel=0.2)
    assert load.backlog(NOW + 12001 * TOKEN) == pytest.approx(0.0, abs=0.02)
    assert not load.prompts.jobs or load.backlog(NOW + 13000 * TOKEN) == 0.0


def test_speed_is_learned_from_what_a_proxy_sees() -> None:
    """Prompts in a queue, with steps between them: the times of first tokens tell all."""
    load = EngineLoad(Speeds())
    now = 0.0
    for idx in range(60):
        sizes = (500 + 700 * (idx % 5), 4000, 250)
        jobs = [load.ask(size, 0, now) for size in sizes]
        for job, size in zip(jobs, sizes, strict=True):
            now += size * TOKEN + size * size * 5e-10
            job.end(now)
        answers = [load.expect(2000, now) for _ in range(1 + idx % 7)]
        for answer in answers:
            answer.begin(now)
        for _ in range(30):
            now += 0.005 + 0.0002 * len(answers)
            for answer in answers:
                answer.go_on(1, now)
        for answer in answers:
            answer.end(now)
    for size in (500, 2000, 6000):
        took = size * TOKEN + size * size * 5e-10
        assert load.speed.prefill_seconds(size, 0) == pytest.approx(took, rel=0.15)
    for count in (1, 4, 7):
        step = load.speed.step_seconds(count, 2000 * count)
        assert step == pytest.approx(0.005 + 0.0002 * count, rel=0.05)


def test_a_slow_engine_is_known_apart_from_others() -> None:
    shared = Speeds()
    fast, slow = EngineSpeed(shared), EngineSpeed(shared)
    for _ in range(40):
        fast.note_prefill(4000, 8.0, 0.1)
        slow.note_prefill(4000, 8.0, 0.3)
    assert fast.prefill_seconds(4000, 0) == pytest.approx(0.1, rel=0.2)
    assert slow.prefill_seconds(4000, 0) == pytest.approx(0.3, rel=0.2)


def test_an_engine_that_has_shown_nothing_is_as_fast_as_the_others_are_by_now() -> None:
    shared = Speeds()
    seen, unseen = EngineSpeed(shared), EngineSpeed(shared)
    assert unseen.step_seconds(4, 16000) == unseen.prefill_seconds(4000, 0) == 0.0
    for _ in range(2):
        seen.note_steps(4, 16000, STEP)
        seen.note_prefill(4000, 8.0, 0.1)
        assert unseen.step_seconds(4, 16000) == pytest.approx(STEP)
        assert unseen.prefill_seconds(4000, 0) == pytest.approx(0.1)


def test_steps_are_as_long_by_an_answer_that_is_to_come_as_by_one_that_has_begun() -> None:
    (one,) = engines(planner(), 1)
    for context in (1000, 32000) * 15:
        one.load.speed.note_steps(1, context, STEP + 1e-7 * context)
    answer = one.load.expect(16000, NOW)
    to_come = _Costs(one, 4000, NOW).steps.step
    answer.begin(NOW)
    assert to_come == _Costs(one, 4000, NOW).steps.step > STEP


def test_an_answer_whose_prompt_waits_counts_where_it_is_to_be() -> None:
    """Until it is sent, or too late to be in time. Answers take half of that limit, so half of
    those to come are there at a time."""
    made = planner(first_token=1.0, per_token=0.02, answer_tokens=25)
    (one,) = engines(made, 1)
    for num in 10 * (1, 4, 16):
        one.load.speed.note_steps(num, 4000 * num, STEP + 5e-5 * num)
    alone, way = _Costs(one, 4000, NOW).steps.step, place(made, [one], [one])
    planned = made.note(way, 4000, NOW)
    assert one.load.to_come(NOW) == pytest.approx((0.5, 2000))
    costs = _Costs(one, 40000, NOW)
    assert costs.steps.step > alone
    assert made._late(costs, BY_PROMPT, NOW, MAX_SEEN) == pytest.approx(0.5)
    planned.end()
    assert one.load.to_come(NOW) == (0, 0)
    for is_lost, seconds, num in ((False, 0.9, 0.5), (False, 1.1, 0), (True, 0.1, 0)):
        made.note(way._replace(is_lost=is_lost), 4000, NOW)
        assert one.load.to_come(NOW + seconds)[0] == pytest.approx(num)
        one.load.planned.clear()


def test_a_request_is_lost_that_is_late_by_far_or_by_its_first_token() -> None:
    """Not where prompts alone make tokens late. They have taken a share of the time."""
    cases = [(0, 0.02, 0.0, False), (50000, 0.02, 0.0, True), (0, STEP / 1.05, 0.0, False)]
    cases += [(0, STEP / 1.25, 0.0, True), (0, STEP / 0.75, 0.5, False), (0, STEP / 0.85, 0.5, 1)]
    for queue, per_token, prompts, is_lost in cases:
        made = planner(first_token=1.0, per_token=per_token)
        (one,) = engines(made, 1)
        one.load.recent.share = prompts
        if queue:
            one.load.ask(queue, 0, NOW)
        assert place(made, [], [one]).is_lost == is_lost


@pytest.mark.parametrize(("answer", "idx"), [(30, 1), (100, 1), (160, 0)])
def test_late_prompts_go_where_most_wait_if_answers_end_soon(answer: int, idx: int) -> None:
    made = planner(first_token=1.0, per_token=2 * STEP, answer_tokens=answer)
    for one, tokens in zip(both := engines(made), (4000, 8000), strict=True):
        one.load.ask(tokens, 0, NOW)
        one.load.recent.share = 0.9
    assert place(made, both, both).prefill is both[idx]


@pytest.mark.parametrize(("needed", "is_local"), [(0.5, True), (0.9, False)])
def test_the_last_of_the_slack_is_kept_for_what_comes_next(needed: float, is_local: bool) -> None:
    """The answer needs a share of its tokens to make up for the prompt. All were alike so far, so
    it would be in time, were nothing else to come."""
    made = planner(first_token=5.0, per_token=STEP + 4000 * TOKEN / (160 * needed))
    source, target = engines(made)
    running(target.load, 1, 0.0)
    assert place(made, [source, target], [target]).is_local == is_local


@pytest.mark.parametrize(
    ("queue", "per_token", "samples", "idx"),
    [(0, 0.02, 1, 2), (4000, 0.02, 1, 2), (30000, 0.0085, 1, 2), (40000, 0.02, 0, 2)]
    + [(40000, 0.02, 1, 1)],
)
def test_answers_go_to_few_engines_while_prompts_wait(
    queue: int, per_token: float, samples: int, idx: int
) -> None:
    """So that one gets free for prompts: the engine with the most answers takes more, if all fit
    it, as far as steps are known. Else the one with the fewest, as its steps are the shortest."""
    made = planner(first_token=1.0, per_token=per_token)
    three = engines(made, 3)
    for one, num_answers in zip(three, (0, 8, 7), strict=True):
        for num in 10 * (1, 4, 16):
            one.load.speed.note_steps(num, 4000 * num, STEP + 1e-4 * num)
        for _ in range(num_answers):
            running(one.load, 20, 20 * STEP)
    three[0].load.recent.share, made.shared.steps.num_samples = 0.9, samples
    if queue:
        three[0].load.ask(queue, 0, NOW)
    assert place(made, three, three).decode is three[idx]


@pytest.mark.parametrize(("num_answers", "is_full"), [(10, False), (16, True), (60, True)])
def test_an_answer_that_is_late_anywhere_is_kept_from_an_engine_that_has_too_many(
    num_answers: int, is_full: bool
) -> None:
    """So that those there come in time again. The other engine computes prompts all the time, the
    one with answers a fifth of it."""
    limit = 0.0085
    made = planner(per_token=limit)
    source, target = engines(made)
    for num in 10 * (1, 4, 16):
        target.load.speed.note_steps(num, 4000 * num, STEP + 5e-5 * num)
    for _ in range(num_answers):
        running(target.load, 20, 20 * 0.009)
    source.load.recent.share, target.load.recent.share = 0.9, 0.2
    costs = _Costs(target, 4000, NOW)
    assert costs.steps.pace > limit
    assert (costs.steps.slower > limit) == is_full
    assert place(made, [source, target], [source, target]).decode is (source if is_full else target)


@pytest.mark.parametrize("per_token", [0.0075, 0.008])
def test_answers_are_late_where_one_more_makes_steps_longer_than_the_limit(
    per_token: float,
) -> None:
    """They have slack so far, which each token then takes of: longer ones come late, or all that
    have none where a token takes just the limit."""
    made = planner(per_token=per_token)
    (one,) = engines(made, 1)
    running(one.load, 10, 10 * STEP)
    costs = _Costs(one, 4000, NOW)
    costs.steps.step, costs.steps.slower = STEP, 0.008
    late = made._late(costs, BY_ANSWER, NOW, MAX_SEEN)
    assert late == (0.0 if per_token == 0.008 else 1.0)
