"""Which engine gets a prompt whose beginning one of them may hold."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.request_bodies import arrived
from vllm_commext.proxy.engines.affinity import BLOCK_BYTES, MAX_BLOCKS, MIN_WEIGHT, Memory, Prefix
from vllm_commext.proxy.engines.choice import least_work
from vllm_commext.proxy.engines.engine import DECODE, Capabilities, Engine, EnginePool
from vllm_commext.proxy.http.endpoint_prompts import CHAT, COMPLETIONS, prompt_tokens
from vllm_commext.proxy.http.json_members import num_tokens
from vllm_commext.proxy.session.two_step_bodies import prefix_of

quick = settings(max_examples=50, deadline=None)
ANSWER = {"role": "assistant", "content": "a" * 900}


def prompt_of(body: dict[str, Any]) -> Any:
    return body.get("messages", body.get("prompt"))


def prefix(body: dict[str, Any], session: str | None = None) -> Prefix:
    read = arrived(body)
    endpoint = CHAT if "messages" in body else COMPLETIONS
    return prefix_of(read, endpoint, session, prompt_tokens(read))


def num_tokens_of(body: dict[str, Any]) -> int:
    return num_tokens(prompt_of(arrived(body)))


def remembering(*bodies: dict[str, Any], max_tokens: int = 10**9) -> Memory:
    memory = Memory(max_tokens)
    for body in bodies:
        memory.note(prefix(body))
    return memory


@quick
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3 * BLOCK_BYTES))
def test_a_prompt_that_goes_on_from_another_is_known_as_far_as_that_went(
    shared: int, more: int, tail: int
) -> None:
    text = "".join(chr(97 + (k * k) % 23) for k in range(shared * 512))
    old, new = {"prompt": text + "x" * tail}, {"prompt": text + "y" * (more * 512 + 1)}
    held = remembering(old).held_tokens(prefix(new))
    whole_blocks = len(text) // BLOCK_BYTES
    tokens = num_tokens_of(new)
    expected = whole_blocks * BLOCK_BYTES * tokens / len(new["prompt"])
    assert abs(held - min(expected, tokens - 1)) <= 1


@quick
@given(st.lists(st.text(max_size=2000), max_size=6), st.lists(st.text(max_size=2000), max_size=6))
def test_no_more_is_held_than_all_tokens_but_the_last(old: list[str], new: list[str]) -> None:
    bodies = [{"messages": [{"role": "user", "content": text} for text in of]} for of in (old, new)]
    held = remembering(*bodies).held_tokens(prefix(bodies[1]))
    assert 0 <= held <= max(num_tokens_of(bodies[1]) - 1, 0)


@pytest.mark.parametrize("changed", ["model", "cache_salt"])
def test_another_model_or_salt_shares_nothing(changed: str) -> None:
    body = {"model": "m", "cache_salt": "s", "prompt": "w" * 8000}
    assert remembering(body).held_tokens(prefix(body)) > 0
    assert remembering(body).held_tokens(prefix({**body, changed: "other"})) == 0


def test_a_prompt_of_token_ids_is_known_whether_it_came_large_or_small() -> None:
    ids = list(range(1000, 5000))
    small, large = {"prompt": ids}, {"prompt": [*ids, *range(20_000)]}
    held = remembering(small).held_tokens(prefix(large))
    assert 0.9 * len(ids) < held <= len(ids)
    assert remembering(large).held_tokens(prefix(small)) > 0.9 * len(ids)


@pytest.mark.parametrize("forgets", [False, True])
def test_an_engine_that_caches_no_prefixes_holds_nothing(forgets: bool) -> None:
    engine, asked = Engine(DECODE, "d", "http://d", Memory(10**6)), prefix({"prompt": "w" * 8000})
    engine.learn(Capabilities(is_known=True, forgets=forgets))
    engine.note_answer(asked)
    assert (engine.memory.held_tokens(asked) == 0) == forgets


def test_only_the_beginning_of_a_long_prompt_is_looked_at() -> None:
    body = {"prompt": "w" * (10 * MAX_BLOCKS * BLOCK_BYTES)}
    assert len(prefix(body).blocks) == MAX_BLOCKS


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": 3}, {"messages": "text"}])
def test_bodies_that_an_engine_will_refuse_have_a_prefix_too(body: dict[str, Any]) -> None:
    assert remembering(body).held_tokens(prefix(body)) == 0


def test_a_session_is_held_whatever_its_prompt_begins_with() -> None:
    memory = Memory(10**6)
    memory.note(prefix({"prompt": "a" * 4000}, "s"))
    other = {"prompt": "b" * 8000}
    assert memory.held_tokens(prefix(other, "s")) == 1000
    assert memory.held_tokens(prefix(other, "t")) == 0
    assert memory.held_tokens(prefix(other)) == 0


def test_what_was_asked_longest_ago_is_forgotten_from_its_end() -> None:
    old, new = {"prompt": "o" * 40 * BLOCK_BYTES}, {"prompt": "n" * 40 * BLOCK_BYTES}
    each = num_tokens_of(old)
    memory = remembering(old, new, max_tokens=each * 3 // 2)
    assert memory.held_tokens(prefix(new)) == each - 1
    held = memory.held_tokens(prefix(old))
    assert each // 3 < held < each * 2 // 3
    memory.clear()
    assert memory.held_tokens(prefix(new)) == 0


def pool_of(*tokens: int) -> EnginePool:
    pool = EnginePool("prefill", affinity_tokens=10**6)
    for idx in range(len(tokens)):
        pool.add(f"http://h:{idx + 1}")
    for engine, count in zip(pool.engines, tokens, strict=True):
        engine.state.pass_check()
        engine.work.tokens = count
    return pool


def test_affinity_is_weighed_against_load() -> None:
    body = {"prompt": "w" * 40_000}  # 10,000 tokens
    for load, chosen in ((9_000, 0), (10_500, 1)):
        pool = pool_of(load, 0)
        pool.engines[0].memory.note(prefix(body))
        assert least_work(pool, (), prefix(body))[0] is pool.engines[chosen]
        assert least_work(pool) == (pool.engines[1], 0)


@pytest.mark.parametrize("how", ["refuses", "fails its check"])
def test_an_engine_that_went_away_holds_nothing_when_it_is_back(how: str) -> None:
    body = {"prompt": "w" * 40_000}
    engine = pool_of(0).engines[0]
    engine.memory.note(prefix(body))
    if how == "refuses":
        engine.refuse("refused")
    else:
        engine.fall("gone")
    engine.state.pass_check()
    assert engine.memory.held_tokens(prefix(body)) == 0


@pytest.mark.parametrize("body", [{"prompt": ""}, {"messages": [None] * 1000}])
def test_prompts_without_tokens_do_not_fill_the_memory(body: dict[str, Any]) -> None:
    """Each has a name of its own, and weighs nothing by itself."""
    memory = Memory(1000)
    for number in range(500):
        memory.note(prefix({**body, "cache_salt": str(number)}, f"s{number}"))
    assert len(memory) <= 2 * 1000 // MIN_WEIGHT


def test_a_prompt_that_utf_8_cannot_write_has_a_prefix_too() -> None:
    text = "\ud800" * BLOCK_BYTES
    held = remembering({"prompt": text}).held_tokens(prefix({"prompt": text + "!"}))
    assert held > 0


async def test_what_an_engine_holds_of_a_prompt_is_no_work_while_it_computes_the_rest(
    kit: Any,
) -> None:
    """Turns of one conversation at the same time stay with the engine that has its beginning."""
    text = "w" * 40_000  # 10,000 tokens
    released = asyncio.Event()

    async def ask(cluster: Any, more: str) -> str:
        return (await cluster.ask({"prompt": text + more})).headers["X-Commext-Prefill"]

    async with kit.cluster(2, 1) as cluster:
        first = await ask(cluster, "")
        for engine in cluster.prefill:
            engine.behave = kit.held(released, kit.prefill_ok)
        asked = [asyncio.create_task(ask(cluster, str(number))) for number in range(4)]
        await kit.until(
            lambda: sum(len(engine.calls) for engine in cluster.prefill) == 5, "all requests"
        )
        released.set()
        assert set(await asyncio.gather(*asked)) == {first}
