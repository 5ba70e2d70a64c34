"""Streams that go on at another decode engine: the client gets each token once, under one id, or
the error that it has always got."""

import asyncio
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.proxy.errors_phases import Outcome, Resume
from vllm_commext.proxy.http.endpoint_prompts import ENDPOINTS
from vllm_commext.proxy.policy.prompt_queue import REPEATED_TOKENS, Repeats
from vllm_commext.proxy.session.failures import MAX_RESUMES, MIN_APART
from vllm_commext.proxy.session.resumable_stream import Room, Transcript, refusal
from vllm_commext.proxy.session.two_step_bodies import local_prefill_reason

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"id":"%s","created":%d,"choices":[],"usage":{"completion_tokens":9}}\n\n'
ROOM_BYTES = 1 << 20


def event(engine: int, path: str, **choice: Any) -> bytes:
    """As vLLM writes it; each engine has an id and a time of its own."""
    text = {name: choice.pop(name) for name in ("text", "delta") if name in choice}
    every = {"index": 0, **text, "logprobs": None, "finish_reason": None, **choice}
    content = {"id": f"one-{engine}", "created": 1000 + engine, "choices": [every]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return b"data: %b\n\n" % text.encode()


def part(path: str, text: str) -> dict[str, Any]:
    return {"text": text} if path == COMPLETIONS else {"delta": {"content": text} if text else {}}


def stream(engine: int, path: str, cuts: Iterable[Sequence[tuple[int, str]]]) -> list[bytes]:
    """A whole answer's events; each tells some tokens with what they add to the text."""
    role = {"delta": {"role": "assistant", "content": ""}}
    events = [event(engine, path, **role)] if path == CHAT else []
    pieces = [list(cut) for cut in cuts]
    for number, cut in enumerate(pieces):
        text = "".join(word for _, word in cut)
        end = "stop" if number == len(pieces) - 1 else None
        ids = [token for token, _ in cut]
        events.append(event(engine, path, **part(path, text), token_ids=ids, finish_reason=end))
    return [*events, USAGE % (b"one-%d" % engine, 1000 + engine), DONE]


def contents(events: bytes) -> list[dict[str, Any]]:
    lines = [line for line in events.split(b"\n\n") if line.startswith(b"data: {")]
    return [json.loads(line[len(b"data: ") :]) for line in lines]


def told(events: bytes) -> tuple[str, list[int], set[tuple[str, int]], list[str]]:
    """All text, token ids, names, and how it ends, of what a client has got."""
    every = contents(events)
    choices = [choice for one in every for choice in one["choices"]]
    text = "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)
    ids = [token for one in choices for token in one.get("token_ids") or []]
    names = {(one["id"], one["created"]) for one in every}
    return text, ids, names, [one["finish_reason"] for one in choices if one["finish_reason"]]


def cut_up(answer: Sequence[Any], dice: random.Random) -> list[Sequence[Any]]:
    """The same tokens in events of several."""
    places = sorted(dice.sample(range(1, len(answer)), dice.randrange(len(answer))))
    return [answer[a:b] for a, b in zip([0, *places], [*places, len(answer)], strict=True)]


ANSWER = [(n, word) for n, word in enumerate(["ab", "", "c\n", "ü", '"', "", "😀d", "e\\", "f"])]
PATHS = st.sampled_from([CHAT, COMPLETIONS])


@given(PATHS, st.booleans(), st.integers(0, 1 << 30), st.integers(1, 3))
def test_each_token_comes_once(path: str, asks_ids: bool, seed: int, num_lost: int) -> None:
    """Wherever streams break off, and however their tokens are cut into events and pieces."""
    dice = random.Random(seed)
    transcript = Transcript(Room(ROOM_BYTES), {"return_token_ids": asks_ids}, 100)
    got = b""
    for engine in range(num_lost + 1):
        if engine:
            transcript.begin_again()
        events = stream(engine, path, cut_up(ANSWER, dice))
        if engine < num_lost:
            events = events[: dice.randrange(1, len(events))]
        while events:
            count = dice.randrange(1, len(events) + 1)
            got += transcript.pass_on(b"".join(events[:count]))
            events = events[count:]
    assert transcript.refusal is None
    text, ids, names, ends = told(got)
    assert text == "".join(word for _, word in ANSWER)
    assert ids == ([n for n, _ in ANSWER] if asks_ids else [])
    assert names == {("one-0", 1000)}
    assert ends == ["stop"]
    assert got.count(b'"usage"') == got.count(DONE) == 1
    assert got.endswith(DONE)
    assert sum("role" in one.get("delta", {}) for c in contents(got) for one in c["choices"]) == (
        path == CHAT
    )


def test_what_one_engine_tells_twice_comes_twice() -> None:
    usage = USAGE % (b"one-0", 1000)
    assert Transcript(Room(ROOM_BYTES), {}, 0).pass_on(usage + usage) == usage + usage


def resumed(first: bytes, second: bytes, body: Mapping[str, Any] | None = None) -> bytes:
    """What a client gets after the first engine is lost."""
    transcript = Transcript(Room(ROOM_BYTES), body or {}, 0)
    transcript.pass_on(first)
    transcript.begin_again()
    return transcript.pass_on(second) or (b"failed" if transcript.has_failed else b"")


def says(engine: int, **choice: Any) -> bytes:
    return event(engine, CHAT, **choice)


def calls(engine: int, ids: list[int], *parts: Any) -> bytes:
    """An event with parts of tool calls: number, and name or arguments."""
    told = [
        {"index": n, "id": f"call-{engine}", "type": "function", "function": {"name": text}}
        if kind == "name"
        else {"index": n, "function": {"arguments": text}}
        for n, kind, text in parts
    ]
    return says(engine, delta={"tool_calls": told}, token_ids=ids)


SPLICES: dict[str, tuple[bytes, bytes, Any]] = {
    # What the client has, what the other engine says, and what the client gets of that.
    "reasoning, then content": (
        says(0, delta={"reasoning": "hm"}, token_ids=[1]),
        says(1, delta={"reasoning": "hmm", "content": "so"}, token_ids=[1, 2]),
        {"reasoning": "m", "content": "so"},
    ),
    "content and reasoning at once": (
        says(0, delta={"content": "a"}, token_ids=[1])
        + says(0, delta={"content": "b", "reasoning": "h"}, token_ids=[2])
        + says(0, delta={"content": '":'}, token_ids=[3]),
        says(1, delta={"content": 'ab":c', "reasoning": "hm"}, token_ids=[1, 2, 3, 4]),
        {"content": "c", "reasoning": "m"},
    ),
    "a call that the client knows": (
        calls(0, [1, 2], (0, "name", "f"), (0, "arguments", '{"a')),
        calls(1, [1, 2, 3], (0, "name", "f"), (0, "arguments", '{"a": 1')),
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1'}}]},
    ),
    "a call that it does not": (
        calls(0, [1], (0, "name", "f")),
        calls(1, [1, 2], (0, "name", "f"), (1, "name", "g")),
        {
            "tool_calls": [
                {"index": 1, "id": "call-1", "type": "function", "function": {"name": "g"}}
            ]
        },
    ),
    "text that the other one still holds back": (
        says(0, delta={"content": "ab"}, token_ids=[1]),
        says(1, delta={"content": "a"}, token_ids=[1])
        + says(1, delta={"content": "bc"}, token_ids=[2]),
        None,
    ),
    "text of a new token that reads like what is left": (
        calls(0, [1, 2], (0, "name", "f"), (0, "arguments", "{}")),
        calls(1, [1, 2], (0, "name", "f")) + calls(1, [3], (0, "arguments", "{}")),
        None,
    ),
    "more text without a new token": (
        says(0, delta={"content": "ab"}, token_ids=[1, 2]),
        says(1, delta={"content": "abc"}, token_ids=[1]),
        None,
    ),
    "another end": (
        says(0, delta={"content": "a"}, token_ids=[1], finish_reason="stop"),
        says(1, delta={"content": "a"}, token_ids=[1], finish_reason="tool_calls"),
        None,
    ),
    "a token after the end": (
        says(0, delta={"content": "a"}, token_ids=[1], finish_reason="stop"),
        says(1, delta={"content": "a"}, token_ids=[1]),
        None,
    ),
    "log probabilities": (
        says(0, delta={"content": "ab"}, token_ids=[1, 2], logprobs={"content": ["A", "B"]}),
        says(
            1, delta={"content": "abc"}, token_ids=[1, 2, 3], logprobs={"content": ["A", "B", "C"]}
        ),
        {"content": "c", "logprobs": {"content": ["C"]}},
    ),
    "other tokens": (
        says(0, delta={"content": "ab"}, token_ids=[1]),
        says(1, delta={"content": "ab"}, token_ids=[2]),
        None,
    ),
    "other text": (
        says(0, delta={"content": "ab"}, token_ids=[1]),
        says(1, delta={"content": "ac"}, token_ids=[1]),
        None,
    ),
    "an end too early": (
        says(0, delta={"content": "ab"}, token_ids=[1, 2]),
        says(1, delta={"content": "a"}, token_ids=[1], finish_reason="stop"),
        None,
    ),
    "nothing but an end": (says(0, delta={"content": "ab"}, token_ids=[1, 2]), DONE, None),
    "usage alone": (
        says(0, delta={"content": "ab"}, token_ids=[1, 2]),
        USAGE % (b"one-1", 1),
        None,
    ),
    "no token ids": (
        says(0, delta={"content": "ab"}, token_ids=[1, 2]),
        says(1, delta={"content": "ab"}),
        None,
    ),
    "no JSON": (says(0, delta={"content": "ab"}, token_ids=[1]), b"data: {\n\n", None),
}


@pytest.mark.parametrize("case", SPLICES)
def test_what_the_client_has_not(case: str) -> None:
    first, second, expected = SPLICES[case]
    got = resumed(first, second)
    if expected is None:
        assert got == b"failed"
        return
    (content,) = contents(got)
    choice, logprobs = content["choices"][0], expected.pop("logprobs", None)
    assert (choice["delta"], choice["logprobs"]) == (expected, logprobs)
    assert (content["id"], content["created"]) == ("one-0", 1000)


LEFT: dict[str, tuple[bytes, Resume]] = {
    "no token ids": (says(0, delta={"content": "a"}), Resume.NOT_TOLD),
    "an unknown part": (says(0, delta={"audio": {"data": "x"}}, token_ids=[1]), Resume.NOT_TOLD),
    "a token out of range": (says(0, delta={}, token_ids=[1 << 40]), Resume.NOT_TOLD),
    "another thing": (b'data: {"n": 1}\n\n', Resume.NOT_TOLD),
    "text": (b"data: hello\n\n", Resume.NOT_TOLD),
    "an error of the request's": (b'data: {"error":{"code":400}}\n\n', Resume.NOT_TOLD),
    "more than there is room for": (
        says(0, delta={"content": "a" * 8192}, token_ids=[]) * (ROOM_BYTES // 8192),
        Resume.NO_ROOM,
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_kept_passes_as_it_is(case: str) -> None:
    events, reason = LEFT[case]
    room = Room(ROOM_BYTES)
    transcript = Transcript(room, {"return_token_ids": True}, 100)
    assert transcript.pass_on(events) == events
    assert transcript.refusal == reason
    assert transcript.pass_on(DONE) == DONE
    assert room._left == ROOM_BYTES, "it counts no more"  # pyright: ignore[reportPrivateUsage]


def test_what_is_too_much_for_all_streams_takes_the_largest_one() -> None:
    room, large = Room(ROOM_BYTES), ROOM_BYTES // 20
    small = [Transcript(room, {}, 100) for _ in range(4)]
    greedy = [Transcript(room, {}, 0) for _ in range(24)]
    for number, one in enumerate(greedy):
        one.keep({"prompt": "x"}, large + number)
    given_up = [one for one in greedy if one.refusal is Resume.NO_ROOM]
    assert 0 < len(given_up) < len(greedy)
    assert all(one.body == {} for one in given_up)
    assert [one.refusal for one in small] == [None] * 4
    late = Transcript(room, {}, 100)
    late.pass_on(event(0, COMPLETIONS, text="a", token_ids=[1]))
    assert late.refusal is None, "a small one has room even now"
    alone = Transcript(room, {}, ROOM_BYTES // 8)
    assert alone.refusal is Resume.NO_ROOM, "more than one may have"


def test_token_ids_stay_hidden_of_what_is_not_kept() -> None:
    transcript = Transcript(Room(0), {}, 1)
    assert transcript.refusal == Resume.NO_ROOM
    asked = event(0, COMPLETIONS, text="a", token_ids=[1, 2])
    assert transcript.pass_on(asked) == event(0, COMPLETIONS, text="a", token_ids=None)


@pytest.mark.parametrize(
    "failure",
    [
        b'data: {"error":{"code":500}}\n\n',
        b'data: {"error":"x"}\n\n',
        event(0, COMPLETIONS, text="", token_ids=[], finish_reason="abort"),
        event(0, COMPLETIONS, text="", token_ids=[], finish_reason="error"),
    ],
)
def test_an_engines_failure_is_held(failure: bytes) -> None:
    good = event(0, COMPLETIONS, text="a", token_ids=[1])
    transcript = Transcript(Room(ROOM_BYTES), {"return_token_ids": True}, 0)
    assert transcript.pass_on(good + failure + DONE) == good
    assert (transcript.has_failed, transcript.held, transcript.refusal) == (True, failure, None)


def test_what_an_engine_is_asked() -> None:
    transcript = Transcript(Room(ROOM_BYTES), {}, 0)
    body = {"a": 1, "kv_transfer_params": {"b": 2}}
    assert transcript.asking(body) == {**body, "return_token_ids": True}
    transcript.pass_on(event(0, COMPLETIONS, text="a", token_ids=[4, 5]))
    params = {"answer_token_ids": [4, 5], "answer_pieces": [2]}
    assert transcript.asking(body)["kv_transfer_params"] == {"b": 2, **params}
    assert transcript.asking({})["kv_transfer_params"] == params


def test_a_chats_pieces_go_to_the_next_engine() -> None:
    """Those of the engine that is further, where one has begun again."""
    transcript = Transcript(Room(ROOM_BYTES), {}, 0)
    transcript.pass_on(b"".join(stream(0, CHAT, [ANSWER[:1], ANSWER[1:]])[:2]))
    assert "answer_pieces" not in transcript.asking({})["kv_transfer_params"]
    transcript.begin_again()
    cuts = [ANSWER[:2], ANSWER[2:3], ANSWER[3:6], ANSWER[6:]]
    transcript.pass_on(b"".join(stream(1, CHAT, cuts)[:4]))
    assert transcript.asking({})["kv_transfer_params"]["answer_pieces"] == [2, 1, 3]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_long_answer_is_kept_whole(path: str) -> None:
    """Most of its events are passed on before they are read."""
    answer = [(n, f'"{n}\\ü\n') for n in range(2000)]
    transcript = Transcript(Room(ROOM_BYTES), {}, 0)
    events = stream(0, path, [[one] for one in answer])[:-3]
    got = b"".join(map(transcript.pass_on, events))
    assert told(got)[0] == "".join(word for _, word in answer[:-1])
    assert b'"token_ids":[' not in got
    asked = transcript.asking({})["kv_transfer_params"]["answer_token_ids"]
    assert asked == list(range(1999))
    transcript.begin_again()
    rest = transcript.pass_on(b"".join(stream(1, path, [answer])))
    assert told(rest)[0] == answer[-1][1]


def begins(mark: int, ids: str) -> bytes:
    """An answer's beginning, whose prompt's first id has above 32 bits what computes it."""
    return b'{"prompt_token_ids":[%d,22],"token_ids":%s}' % ((mark << 32) + 1, ids.encode())


@pytest.mark.parametrize("asks_ids", [False, True])
@pytest.mark.parametrize(("first", "second"), [(0, 0), (7, 7), (7, 0), (0, 7), (7, 8)])
def test_a_stream_goes_on_where_the_same_adapter_and_weights_compute(
    first: int, second: int, asks_ids: bool
) -> None:
    """Also where an engine tells nothing. Clients get the prompt's own ids, if they ask."""
    shown = b'{"prompt_token_ids":%s,"token_ids":[3]}' % (b"[1,22]" if asks_ids else b"null")
    transcript = Transcript(Room(ROOM_BYTES), {"return_token_ids": asks_ids}, 0)
    assert transcript.edit(begins(9, "[3]")) == shown, "given up before anything was sent"
    assert transcript.edit(begins(first, "[3]")) == shown
    transcript.pass_on(event(0, COMPLETIONS, text="a", token_ids=[3]))
    assert transcript.edit(begins(second, "[3]")) == (
        shown if first == second or 0 in (first, second) else None
    )
    assert transcript.edit(b'{"token_ids":[3]}') == b'{"token_ids":[3]}'


STREAM: dict[str, Any] = {"stream": True, "messages": []}
REFUSALS: dict[str, tuple[str, dict[str, Any], Resume | None]] = {
    "a chat": (CHAT, {}, None),
    "ids are asked for": (CHAT, {"return_token_ids": True}, None),
    "log probabilities": (CHAT, {"logprobs": True}, None),
    "samples": (CHAT, {"n": 2}, Resume.SAMPLES),
    "no stream": (CHAT, {"stream": False}, Resume.ENDPOINT),
    "an echo": (CHAT, {"echo": True}, Resume.ECHO),
    "another endpoint": ("/v1/responses", {}, Resume.ENDPOINT),
    "several prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, Resume.SAMPLES),
    "ids are asked for in another way": (CHAT, {"return_token_ids": "yes"}, Resume.NOT_TOLD),
    "versions of weights": (CHAT, {"return_weight_versions": True}, Resume.NOT_TOLD),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_resumed(case: str) -> None:
    path, changes, expected = REFUSALS[case]
    body, endpoint = {**STREAM, **changes}, ENDPOINTS[path]
    assert refusal(endpoint.is_split, body, local_prefill_reason(endpoint, body)) == expected


WORDS = [[(1, "a")], [(2, "b")], [(3, "c")]]
PIECES: dict[str, Any] = {CHAT: {}, COMPLETIONS: {"answer_pieces": [2]}}
"""What goes to the next engine beside the first two: a chat's come one by one."""


def answering(
    events: list[bytes], *, ends: bool | None = True, has_begun: asyncio.Event | None = None
) -> Any:
    """Answer with these events, of which the last one waits until the client has some; None: then
    it says nothing more."""

    async def behave(call: Any) -> None:
        await call.begin_stream()
        for one in events:
            if one is events[-1] and has_begun is not None:
                await has_begun.wait()
            await call.chunk(one)
        if ends is None:
            await asyncio.Event().wait()
        if ends:
            await call.end_stream()

    return behave


def result(name: Resume, count: int = 1) -> str:
    return f'commext_proxy_resumes_total{{result="{name}"}} {count:.1f}'


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", ["connection", "error", "abort", "end", "silence"])
async def test_a_stream_goes_on_at_another_engine(
    kit: Any, monkeypatch: pytest.MonkeyPatch, path: str, how: str
) -> None:
    outcomes: list[Outcome] = []
    end_well = Outcome.end_well
    monkeypatch.setattr(Outcome, "end_well", lambda one: (outcomes.append(one), end_well(one)))
    begun = stream(0, path, WORDS)[:-3]
    if how == "error":
        begun.append(b'data: {"error": {"code": 500}}\n\n' + DONE)
    elif how == "abort":
        begun.append(event(0, path, **part(path, ""), token_ids=[], finish_reason="abort"))
    body, has_begun = {"prompt": "hello", **STREAM}, asyncio.Event()
    ends = None if how == "silence" else how == "end"
    options = {"decode_idle_timeout_seconds": 0.5, "prompt_order": "shortest"}  # which reads load
    async with kit.cluster(num_decode=2, **options) as cluster:
        first, second = cluster.decode
        first.behave = answering(begun, ends=ends, has_begun=has_begun)
        second.behave = answering(stream(1, path, [WORDS[0] + WORDS[1], WORDS[2]]))
        async with cluster.post(body, path) as response:
            got = await response.content.readany()
            has_begun.set()
            text, ids, names, ends = told(got := got + await response.read())
        assert (text, ids, names, ends) == ("abc", [], {("one-0", 1000)}, ["stop"])
        assert [one.get("commext_resumed") for one in contents(got)][-2:] == [1, None]
        assert got.endswith(DONE)
        (call,) = second.calls
        params = {**kit.kv_params, **kit.asks_mark, "answer_token_ids": [1, 2], **PIECES[path]}
        assert call.body["kv_transfer_params"] == params
        assert all("return_token_ids" not in call.body for call in cluster.prefill[0].calls)
        page = await cluster.metrics()
        assert result(Resume.RESUMED) in page
        assert 'outcome="ok",side="proxy"} 1.0' in page
        await kit.until(lambda: outcomes[0].tokens == 3, "the tokens of both engines")
        assert 0 < outcomes[0].per_token * 2 < outcomes[0].seconds


TELLING = b'"token_ids"', b'"prompt_token_ids":[%d,22],"token_ids"' % ((8 << 32) + 1)
ENDS: dict[str, tuple[dict[str, Any], list[bytes], Resume, str]] = {
    # What is asked for, how the other engine answers, what it counts as, and the client's error.
    "another answer": (
        {},
        stream(1, COMPLETIONS, [[(1, "a"), (9, "x")]]),
        Resume.DIFFERS,
        "bad_answer",
    ),
    "no answer": ({}, [], Resume.FAILED, "lost"),
    "another adapter": (
        {},
        [begins(7, "[1]").join([b"data: ", b"\n\n"]), *stream(1, COMPLETIONS, WORDS)],
        Resume.FAILED,
        "lost",
    ),
    "not to be resumed": ({"echo": True}, stream(1, COMPLETIONS, WORDS), Resume.ECHO, "lost"),
    "left off": ({}, stream(1, COMPLETIONS, WORDS), Resume.OFF, "lost"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_a_stream_that_does_not_go_on_ends_with_an_error(kit: Any, case: str) -> None:
    changes, events, expected, kind = ENDS[case]
    is_on = expected is not Resume.OFF
    async with kit.cluster(num_decode=2, resume=is_on) as cluster:
        first, second = cluster.decode
        began = [one.replace(*TELLING, 1) for one in stream(0, COMPLETIONS, WORDS)[:2]]
        first.behave = answering(began, ends=False)
        second.behave = answering(events) if events else kit.answering(500, b"{}")
        async with cluster.post({"prompt": "hello", "stream": True, **changes}) as response:
            got = await response.read()
        assert contents(got)[-1]["error"]["type"] == kind
        assert told(got.rpartition(b"data: ")[0])[0] == "ab"
        is_kept = expected not in (Resume.OFF, Resume.ECHO)
        assert ("return_token_ids" in first.calls[0].body, bool(second.calls)) == (is_kept, is_kept)
        page = await cluster.metrics()
        assert result(expected) in page
        assert kit.outcome(kind, "decode") in page


async def test_a_stream_that_loses_an_engine_of_each_role_goes_on(kit: Any) -> None:
    """As where their host is lost: the prefill engine is found lost when it computes the rest."""
    async with kit.cluster(num_prefill=2, num_decode=2) as cluster:
        cluster.decode[0].behave = answering(stream(0, COMPLETIONS, WORDS)[:2], ends=False)
        cluster.decode[1].behave = answering(stream(1, COMPLETIONS, WORDS))

        async def end_when_asked_again(call: Any) -> None:
            num_asked = sum(len(one.calls) for one in cluster.prefill)
            await (kit.dropping if num_asked == 2 else kit.prefill_ok)(call)

        for engine in cluster.prefill:
            engine.behave = end_when_asked_again
        async with cluster.post({"prompt": "hello", "stream": True}) as response:
            got = await response.read()
        assert (told(got)[0], told(got)[3]) == ("abc", ["stop"])
        assert sum(len(one.calls) for one in cluster.prefill) == 3


@pytest.mark.parametrize("places", [(1, 2, 3), (5, 3, 1)], ids=["further on", "while repeating"])
async def test_a_stream_outlives_engines_that_are_lost_at_other_places(
    kit: Any, places: Sequence[int]
) -> None:
    words = [[(number, f"w{number} ")] for number in range(6 * MIN_APART)]
    async with kit.cluster(num_decode=4) as cluster:
        for number, engine in enumerate(cluster.decode):
            events = stream(number, COMPLETIONS, words)
            is_last = number == len(places)
            most = None if is_last else places[number] * MIN_APART
            engine.behave = answering(events[:most], ends=is_last)
        async with cluster.post({"prompt": "hello", "stream": True}) as response:
            got = await response.read()
        assert told(got)[0] == "".join(word for [(_, word)] in words)
        assert [len(one.calls) for one in cluster.decode] == [1, 1, 1, 1]


async def test_a_request_that_loses_two_engines_is_tried_at_no_third_one(kit: Any) -> None:
    async with kit.cluster(num_decode=3) as cluster:
        for number, engine in enumerate(cluster.decode):
            engine.behave = answering(stream(number, COMPLETIONS, WORDS)[: number + 1], ends=False)
        async with cluster.post({"prompt": "hello", "stream": True}) as response:
            got = await response.read()
        assert contents(got)[-1]["error"]["type"] == "engines_lost"
        assert told(got.rpartition(b"data: ")[0])[0] == "ab"
        assert cluster.decode[2].calls == []


FAILURE = b'data: {"error": {"message": "a parser raised", "code": 500}}\n\n'


@pytest.mark.parametrize("apart", [0, 3, MIN_APART], ids=["one place", "near", "far"])
async def test_a_stream_that_a_second_engine_fails_at_one_place_ends(kit: Any, apart: int) -> None:
    words = [[(number, f"w{number} ")] for number in range(1, 6 * MIN_APART)]
    got = bytearray()

    def failing(events: list[bytes]) -> Any:
        async def behave(call: Any) -> None:
            await call.begin_stream()
            await call.chunk(b"".join(events))
            await kit.until(lambda: got.count(b"\n\n") >= len(events), "the client to have them")
            await call.chunk(FAILURE + DONE)
            await call.end_stream()

        return behave

    async with kit.cluster(num_decode=4) as cluster:
        for number, engine in enumerate(cluster.decode):
            events = stream(number, COMPLETIONS, words)
            engine.behave = failing(events[: 2 * MIN_APART + number * apart])
        async with cluster.post({"prompt": "hello", "stream": True}) as response:
            async for piece in response.content.iter_any():
                got += piece
        assert contents(bytes(got))[-1] == json.loads(FAILURE[6:])
        num_asked = 1 + MAX_RESUMES if apart == MIN_APART else 2
        assert sum(len(one.calls) for one in cluster.decode) == num_asked
        assert result(Resume.FAILED) in await cluster.metrics()


async def test_a_turn_that_is_given_up_is_anothers() -> None:
    repeats = Repeats()
    held = await repeats.take(REPEATED_TOKENS * 9)
    waiting = [asyncio.ensure_future(repeats.take(tokens)) for tokens in (4000, 10, 20)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    repeats.give_back(held)
    waiting[2].cancel()
    await asyncio.wait(waiting)
    assert [one.cancelled() for one in waiting] == [False, True, True]
    repeats.give_back(await waiting[0])
    assert await asyncio.wait_for(repeats.take(REPEATED_TOKENS), 1) == REPEATED_TOKENS
