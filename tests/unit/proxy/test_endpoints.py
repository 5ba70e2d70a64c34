"""Every endpoint that generates: what a request to it costs, and which engine its later turns, and
what goes on from an answer, are sent to."""

import json
import re
from typing import Any

import pytest

from tests.kit.request_bodies import arrived
from vllm_commext.proxy.engines.affinity import SESSION_HEADER, Memory
from vllm_commext.proxy.http import endpoint_prompts as prompts
from vllm_commext.proxy.http.endpoint_prompts import ENDPOINTS, prompt_tokens
from vllm_commext.proxy.session.two_step_bodies import prefix_of

LONG = "w" * 200_000
IDS = list(range(100_000, 150_000))
TEXTS = {"role": "user", "content": LONG}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"prompt": IDS},
        {"prompt": [IDS[:25_000], IDS[25_000:]]},
        {"prompt": [[1] * 25_000, [2] * 25_000]},
        {"prompt": [LONG[:100_000], LONG[100_000:]]},
        {"prompt": "a", "n": 50_000 // 3},
        {"prompt": "w" * 4000, "best_of": 50},
        {"prompt": "w" * 4000, "n": "50"},
        {"prompt": "w" * 4000, "n": 50.0},
        {"prompt_embeds": LONG},
        {"messages": [TEXTS]},
        {"messages": [[{"role": "user", "content": LONG[:100_000]}]] * 2},
        {"messages": [], "tools": [{"function": {"name": "f", "description": LONG}}]},
        {"messages": [], "documents": [{"text": LONG}]},
        {"messages": [], "chat_template_kwargs": {"context": LONG}},
        {"messages": [], "kv_transfer_params": {"prompt_token_ids": IDS}},
        {"messages": [], "a_member_of_tomorrow": LONG},
        {"messages": [], "vllm_xargs": {"a": LONG}},
        {"messages": [], "system": LONG, "max_tokens": 3},
        {"messages": [], "system": [{"type": "text", "text": LONG}]},
        {"input": LONG},
        {"input": [TEXTS]},
        {"input": "a", "instructions": LONG},
        {"input": "a", "tools": [{"type": "function", "parameters": {"a": LONG}}]},
        {"token_ids": IDS, "sampling_params": {"max_tokens": 3}},
        {"token_ids": IDS[:1000], "sampling_params": {"n": 50}},
    ],
)
def test_a_request_costs_what_its_prompt_costs_wherever_that_stands(body: dict[str, Any]) -> None:
    read = arrived(body)
    assert 0.3 < prompt_tokens(read) * prompts.num_samples(read) / 50_000 < 2.2


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hello"}]},
        {"input": "hello", "stop": ["w" * 5000], "logit_bias": {str(n): 1 for n in range(1000)}},
        {"prompt": "hello", "response_format": {"json_schema": {"a": "w" * 5000}}},
        {"token_ids": [1, 2, 3], "sampling_params": {"allowed_token_ids": [*range(5000)]}},
        {},
        {"prompt": "", "n": 0, "best_of": -3},
        {"prompt": None, "n": "many", "sampling_params": 3, "kv_transfer_params": None},
    ],
)
def test_nothing_is_free_and_short_prompts_are_cheap(body: dict[str, Any]) -> None:
    read = arrived(body)
    assert 0 < prompt_tokens(read) * prompts.num_samples(read) < 20


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (CHAT, {"max_tokens": 7}, 7),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 5}, 5),
        (MESSAGES, {"max_tokens": 7}, 7),
        (RESPONSES, {"max_output_tokens": 7, "max_tokens": 3}, 7),
        (GENERATE, {"sampling_params": {"max_tokens": 7}}, 7),
        (GENERATE, {"sampling_params": {"max_tokens": None}}, 1 << 15),
    ],
)
def test_an_answers_bound_is_read_where_it_stands(path: str, body: Any, most: int) -> None:
    assert prompts.most_tokens(ENDPOINTS[path], arrived(body)) == most


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def agents_message(role: str, text: str, marked: bool) -> dict[str, Any]:
    """As agents write it, who mark the last ones to be cached."""
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    return {"role": role, "content": [{"type": "text", "text": text, **mark}]}


def talk(number: int, num_turns: int) -> list[tuple[str, str]]:
    texts = [f"{number} {turn} " * 300 for turn in range(num_turns)]
    return [("assistant" if turn % 2 else "user", text) for turn, text in enumerate(texts)]


def of_chat(number: int, num_turns: int) -> dict[str, Any]:
    return {"messages": [message(*said) for said in talk(number, num_turns)]}


def of_agent(number: int, num_turns: int) -> dict[str, Any]:
    said = talk(number, num_turns)
    messages = [agents_message(*one, one in said[-2:]) for one in said]
    billed = {"type": "text", "text": f"x-anthropic-billing-header: {number}{num_turns}"}
    system = [billed, {"type": "text", "text": "all agents alike " * 300}]
    return {"system": system, "messages": messages, "max_tokens": 9}


def of_session(number: int, num_turns: int) -> dict[str, Any]:
    """Every turn begins otherwise; the agent names its session."""
    user = f"user_ab12_account__session_{number:08x}-0000-4000-8000-000000000000"
    return {"messages": [message("user", "x" * num_turns + LONG)], "metadata": {"user_id": user}}


def of_response(number: int, num_turns: int) -> dict[str, Any]:
    """The first turn as a string, as it is shortest."""
    said = talk(number, num_turns)
    return {"input": said[0][1] if num_turns == 1 else [message(*one) for one in said]}


def of_items(number: int, num_turns: int) -> dict[str, Any]:
    items = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in talk(number, num_turns)
    ]
    return {"instructions": "all alike " * 300, "input": items}


def of_cache_key(number: int, num_turns: int) -> dict[str, Any]:
    return {"input": "x" * num_turns + LONG, "prompt_cache_key": f"k{number}"}


CLIENTS = {
    "chat": (CHAT, of_chat),
    "agent": (MESSAGES, of_agent),
    "agent's session": (MESSAGES, of_session),
    "response": (RESPONSES, of_response),
    "items": (RESPONSES, of_items),
    "cache key": (RESPONSES, of_cache_key),
    "ids": (GENERATE, lambda number, num: {"token_ids": [*range(number, number + 2000 * num)]}),
    "batch": (f"{CHAT}/batch", lambda *one: {"messages": [of_chat(*one)["messages"]]}),
}


async def answered(call: Any) -> None:
    """As each endpoint is answered; an id says which engine gave it."""
    port = call.writer.get_extra_info("sockname")[1]
    told = {"choices": [{"token_ids": [1]}], "content": [], "output": []}
    content = {"id": f"resp_{port}_{id(call)}", **told}
    if call.body.get("stream"):
        created = {"response": content, "type": "response.created"}
        done = {"response": content, "type": "response.completed"}
        events = (f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in (created, done))
        await call.stream(map(str.encode, events))
        return
    await call.answer(200, json.dumps(content).encode())


async def num_moved(kit: Any, client: str, roles: str, affinity: bool = True) -> int:
    """Later turns of 20 conversations that went elsewhere than the first one, in either step."""
    path, body = CLIENTS[client]
    wrong = 0
    counts = (2, 2, 0) if roles == "fixed" else (0, 0, 2)
    async with kit.cluster(*counts[:2], num_both=counts[2], affinity=affinity) as cluster:
        for engine in (*cluster.decode, *cluster.both):
            engine.behave = answered if path != CHAT else kit.both_ok
        for number in range(20):
            seen: list[tuple[str | None, str]] = []
            for turn in range(5):
                response = await cluster.ask(body(number, 2 * turn + 1), path)
                assert response.status == 200, await response.text()
                told = response.headers
                seen.append((told.get("X-Commext-Prefill"), told["X-Commext-Decode"]))
            wrong += sum(engines != seen[0] for engines in seen)
        held = re.findall(r'_affinity_tokens_total{kind="held",.*} (.*)', await cluster.metrics())
        assert (sum(map(float, held)) > 0) == affinity
    return wrong


@pytest.mark.parametrize("roles", ["fixed", "adaptive"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_later_turns_go_to_the_engine_that_has_the_conversation(
    kit: Any, client: str, roles: str
) -> None:
    """With its history, or where every turn begins otherwise, with a session's name."""
    assert await num_moved(kit, client, roles) == 0


async def test_without_affinity_they_do_not(kit: Any) -> None:
    assert await num_moved(kit, "chat", "fixed", affinity=False) > 0


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, GENERATE])
async def test_a_named_session_stays_whatever_its_prompts_begin_with(kit: Any, path: str) -> None:
    async with kit.cluster(1, 2) as cluster:
        for engine in cluster.decode:
            engine.behave = answered
        for number in range(8):
            seen: set[str] = set()
            for turn in range(6):
                text = f"{turn} " * 3000
                body = {
                    "input": text,
                    "messages": [message("user", text)],
                    "token_ids": [turn] * 99,
                }
                named: dict[str, Any] = {"headers": {SESSION_HEADER: f"s{number}"}}
                if number % 2:
                    named, body["session_id"] = {}, f"s{number}"
                seen.add((await cluster.ask(body, path, **named)).headers["X-Commext-Decode"])
            assert len(seen) == 1


@pytest.mark.parametrize("client", ["chat", "agent", "items", "ids"])
def test_nearly_all_of_the_last_turn_counts_as_held(client: str) -> None:
    path, body = CLIENTS[client]
    bodies = [arrived(body(1, turns)) for turns in (5, 7)]
    old, new = (prefix_of(one, ENDPOINTS[path], None, prompt_tokens(one)) for one in bodies)
    memory = Memory(10**9)
    memory.note(old)
    assert memory.held_tokens(new) > 0.85 * old.tokens


async def id_of(response: Any) -> str:
    """Of an answer in one piece, or a stream's first event."""
    text = (await response.text()).partition("data: ")[2].partition("\n")[0]
    return json.loads(text)["response"]["id"] if text else (await response.json())["id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("affinity", [False, True])
async def test_what_goes_on_from_an_answer_goes_to_the_engine_that_keeps_it(
    kit: Any, stream: bool, affinity: bool
) -> None:
    async with kit.cluster(1, 3, affinity=affinity) as cluster:
        for engine in cluster.decode:
            engine.behave = answered
        given: list[str] = []
        for number in range(12):
            first = await cluster.ask({"input": f"{number}", "stream": stream}, RESPONSES)
            given.append(await id_of(first))
        for name in reversed(given):
            for _ in range(3):
                body = {"input": "go on", "previous_response_id": name, "stream": stream}
                assert (await cluster.ask(body, RESPONSES)).status == 200
        for engine in cluster.decode:
            asked = [call.body.get("previous_response_id") for call in engine.calls]
            ports = {name.split("_")[1] for name in asked if name}
            assert ports == {str(engine.port)}


@pytest.mark.parametrize("how", ["unknown", "gone", "drains", "no text", "long"])
async def test_an_answer_that_is_not_there_is_said_and_no_other_engine_is_asked(
    kit: Any, how: str
) -> None:
    async with kit.cluster(1, 2) as cluster:
        for engine in cluster.decode:
            engine.behave = answered
        name: Any = await id_of(await cluster.ask({"input": "hello"}, RESPONSES))
        (keeper,) = (e for e in cluster.pools[1].engines if e.url.endswith(name.split("_")[1]))
        if how == "gone":
            keeper.refuse("gone")
        keeper.state.draining = how == "drains"
        name = {"unknown": "resp_x", "no text": 3, "long": "x" * 5000}.get(how, name)
        asked = sum(len(engine.calls) for engine in cluster.decode)
        body = {"input": "go on", "previous_response_id": name}
        response = await cluster.ask(body, RESPONSES)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (404, 404, "response_id")
        assert error["type"] == "invalid_request_error"
        assert "not found" in error["message"]
        assert "send the conversation as input" in error["message"]
        assert sum(len(engine.calls) for engine in cluster.decode) == asked


async def test_one_engine_alone_judges_ids_itself(kit: Any) -> None:
    """It may have given them before this proxy began."""
    async with kit.cluster(1, 1) as cluster:
        cluster.decode[0].behave = answered
        body = {"input": "go on", "previous_response_id": "resp_old"}
        assert (await cluster.ask(body, RESPONSES)).status == 200


NO_ANSWERS: list[Any] = [
    *({}, [], None, 3, "choices", {"error": None}, {"object": "list", "usage": {}}),
    *({"choices": value} for value in ([], None, {}, "x", [None], [{}], [[]], [{"index": 0}])),
    {"choices": [{"text": "x"}, {}]},
    {"choices": [{"text": None, "finish_reason": "stop"}]},
    {"choices": [{}] * 50_000},
]


@pytest.mark.parametrize("path", [*ENDPOINTS])
async def test_what_is_no_answer_is_asked_for_again_and_then_an_error(kit: Any, path: str) -> None:
    body = {"prompt": "a", "messages": []}
    async with kit.cluster(1, 2) as cluster:
        bad, good = cluster.decode
        for content in NO_ANSWERS:
            bad.behave = good.behave = kit.answering(200, json.dumps(content).encode())
            num_asked = len(bad.calls), len(good.calls)
            response = await cluster.ask(body, path)
            assert (response.status, response.headers["X-Commext-Side"]) == (502, "decode")
            assert (await response.json())["error"]["type"] == "bad_answer"
            assert (len(bad.calls), len(good.calls)) == (num_asked[0] + 1, num_asked[1] + 1)
            good.behave = kit.decode_ok
            assert [(await cluster.ask(body, path)).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, GENERATE])
async def test_a_stream_of_nothing_is_no_answer_either(kit: Any, path: str) -> None:
    async with kit.cluster(1, 2) as cluster:
        for content in (one for one in NO_ANSWERS[:-3] if isinstance(one, dict)):
            event = b"data: " + json.dumps(content).encode() + b"\n\n"
            for engine in cluster.decode:
                engine.behave = kit.streaming(event, event, b"data: [DONE]\n\n")
            response = await cluster.ask({"prompt": "a", "messages": [], "stream": True}, path)
            assert response.status == 502, content
            assert (await response.json())["error"]["type"] == "bad_answer"
        for pieces in ((b": ping\n\n", b"data: [DONE]\n\n"), (b"event: x\n\n",), ()):
            for engine in cluster.decode:
                engine.behave = kit.streaming(*pieces)
            response = await cluster.ask({"prompt": "a", "messages": [], "stream": True}, path)
            assert response.status == 502, pieces
            assert (await response.json())["error"]["type"] == "bad_answer"
