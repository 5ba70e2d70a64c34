"""What is sent ahead of a decode engine's stream, and what is left of that stream: pure."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.vllm_streams import Stream
from vllm_commext.proxy.body import LARGE_BODY_BYTES, members_of
from vllm_commext.proxy.early import rule
from vllm_commext.proxy.early.form import MAX_FORMS, Form, Forms, learn, write_event
from vllm_commext.proxy.early.rule import FirstToken, first_token_of, form_of, refusal
from vllm_commext.proxy.early.splice import FirstTokenDiffersError, Splice
from vllm_commext.proxy.sse import EventCutter
from vllm_commext.proxy.two_step import CHAT, COMPLETIONS

HEADER = "text/event-stream; charset=utf-8"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "p", "stream": True}
# Quotes, escapes, controls, characters of several bytes, and what looks like a part of an event.
texts = st.text(alphabet='ab"\\\n\x01\x7fé\u2028\U0001f600', max_size=4) | st.sampled_from(
    ['"created":1700000000,', "\n\ndata: [DONE]\n\n", "data: {}"]
)
tokens = st.tuples(st.integers(0, 300), texts)
first_tokens = st.tuples(st.integers(0, 300), texts.filter(bool))
streams = st.builds(
    lambda first, others, **named: Stream([first, *others], **named),
    first_tokens,
    st.lists(tokens, max_size=6),
    request_id=st.sampled_from(["r", "another-one"]),
    is_chat=st.booleans(),
    usage=st.sampled_from(["", "last", "each"]),
    with_ids=st.booleans(),
    finish_reason=st.sampled_from(["length", "stop"]),
)


def endpoint_of(stream: Stream) -> str:
    return CHAT if stream.is_chat else COMPLETIONS


def first_of(stream: Stream) -> FirstToken:
    found = first_token_of(endpoint_of(stream), {}, stream.prefill_answer())
    assert isinstance(found, FirstToken)
    return found


def learnt_from(stream: Stream) -> Form:
    """From a stream of the same kind, of two tokens."""
    known = replace(stream, tokens=[(1, "x"), (2, "y")], request_id="known", prompt=(1, 2))
    form = learn(b"".join(known.events([1, 1])), HEADER, "known", first_of(known))
    assert form is not None
    return form


def sizes_of(data: st.DataObject, count: int, name: str) -> list[int]:
    """Any cutting of as many things into runs of at least one."""
    cuts = data.draw(st.sets(st.integers(1, count - 1)), name) if count > 1 else set[int]()
    ends = [*sorted(cuts), count]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def as_it_should_be(stream: Stream, sizes: list[int]) -> bytes:
    """The first token by itself, then what is left of the event that it was in, if anything is."""
    own = replace(stream, tokens=stream.tokens[:1], finish_reason="never")
    first = own.events([1])[: 2 if stream.is_chat else 1]
    first[-1] = first[-1].replace(b'"finish_reason":"never"', b'"finish_reason":null')
    if len(sizes) == 1 and sizes[0] == 1:
        # An event without a token, which only ends the answer.
        rest = replace(stream, tokens=[*stream.tokens, (0, "")]).events([1, 1])
        ended = rest[2 if stream.is_chat else 1]
        ended = ended.replace(b'"token_ids":[0]', b'"token_ids":[]')
        count = len(stream.prompt) + 2
        ended = ended.replace(
            b'"total_tokens":%d,"completion_tokens":2' % count,
            b'"total_tokens":%d,"completion_tokens":1' % (count - 1),
        )
        return b"".join([*first, ended, *stream.events(sizes)[len(first) :]])
    if sizes[0] == 1:
        return b"".join(stream.events(sizes))
    apart = stream.events([1, sizes[0] - 1, *sizes[1:]])
    left = json.loads(apart[len(first)].removeprefix(b"data: "))
    (choice,) = left["choices"]
    says = choice.get("text") or choice.get("delta", {}).get("content") or choice["token_ids"]
    if not says and choice["finish_reason"] is None and "usage" not in left:
        del apart[len(first)]
    return b"".join(apart)


@settings(max_examples=300, deadline=None)
@given(streams, st.data())
def test_any_cutting_into_events_and_segments_gives_the_same_stream(
    stream: Stream, data: st.DataObject
) -> None:
    sizes = sizes_of(data, len(stream.tokens), "tokens in each event")
    ours = stream.created + data.draw(st.integers(-1, 1), "clocks apart")
    raw = b"".join(stream.events(sizes))
    events = learnt_from(stream).fill(stream.request_id, ours, first_of(stream))
    assert events is not None
    sent, cutter, splice = b"".join(map(write_event, events)), EventCutter(), Splice(events)
    start = 0
    for size in sizes_of(data, len(raw), "bytes in each segment"):
        sent += splice.feed(cutter.feed(raw[start : start + size]))
        start += size
    splice.end()
    assert cutter.rest() == b""
    assert sent == as_it_should_be(replace(stream, created=ours), sizes)


@settings(max_examples=100, deadline=None)
@given(streams, first_tokens, st.data())
def test_a_stream_of_another_first_token_is_noticed(
    stream: Stream, other: tuple[int, str], data: st.DataObject
) -> None:
    sizes = sizes_of(data, len(stream.tokens), "tokens in each event")
    came = "".join(text for _, text in stream.tokens[: sizes[0]])
    sent = replace(stream, tokens=[other])
    events = learnt_from(stream).fill(stream.request_id, stream.created, first_of(sent))
    assert events is not None
    splice = Splice(events)
    same_ids = not stream.with_ids or stream.tokens[0][0] == other[0]
    if came.startswith(other[1]) and same_ids:
        splice.feed(b"".join(stream.events(sizes)))
    else:
        with pytest.raises(FirstTokenDiffersError):
            splice.feed(b"".join(stream.events(sizes)))


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_is_no_stream_of_the_token_is_noticed(is_chat: bool) -> None:
    stream = Stream([(1, "a"), (2, "b")], is_chat=is_chat)
    events = learnt_from(stream).fill("r", stream.created, first_of(stream))
    assert events is not None
    raw = b"".join(stream.events([1, 1]))
    wrong = {
        "another request": raw.replace(b'-r"', b'-q"'),
        "another model": raw.replace(b'"tiny"', b'"other"'),
        "nothing": b"data: [DONE]\n\n",
        "no JSON": b"data: {\n\n",
        "no object": b"data: 3\n\n",
        "no event": b"what\n\n",
        "no time": raw.replace(b'"created":1700000000', b'"created":null'),
        "no choice": raw.replace(b'"choices":[{', b'"choices":[{},{'),
    }
    for came in wrong.values():
        with pytest.raises(FirstTokenDiffersError):
            Splice(events).feed(came)
    splice = Splice(events)
    splice.feed(raw[:0])
    with pytest.raises(FirstTokenDiffersError, match="ended before"):
        splice.end()


def test_an_engines_own_error_passes() -> None:
    stream = Stream([(1, "a"), (2, "b")])
    events = learnt_from(stream).fill("r", 1, first_of(stream))
    assert events is not None
    told = b'data: {"error":{"message":"no"}}\n\ndata: [DONE]\n\n'
    splice = Splice(events)
    assert splice.feed(told) == told
    splice.end()


def test_only_what_can_be_written_again_is_learnt() -> None:
    stream = Stream([(1, "a"), (2, "b")], usage="each", with_ids=True)
    opening, first = stream.events([1, 1])[0], first_of(stream)
    assert learn(opening, HEADER, "r", first) is not None
    assert learn(opening, HEADER, "q", first) is None
    assert learn(opening, HEADER, "r", replace(first, token=2)) is None
    assert learn(opening, HEADER, "r", replace(first, text="b")) is None
    assert learn(opening, HEADER, "r", replace(first, num_prompt_tokens=9)) is None
    assert learn(opening, HEADER, "r", replace(first, model="other")) is None
    assert learn(opening.replace(b'"id":', b'"id": '), HEADER, "r", first) is None
    assert learn(stream.events([2])[0], HEADER, "r", first) is None
    for nothing in (b"", b"data: [DONE]\n\n", b"data: 3\n\n", b'data: {"id": 5}\n\n'):
        assert learn(nothing, HEADER, "r", first) is None
    form = learn(opening, HEADER, "r", first)
    assert form.fill("r", 1, replace(first, model="other")) is None


def test_a_refuted_engine_learns_nothing_until_it_was_away() -> None:
    stream, forms = Stream([(1, "a"), (2, "b")]), Forms()
    form = learnt_from(stream)
    for number in range(MAX_FORMS + 1):
        forms.note(str(number), form)
    assert forms.get("0") is None
    assert forms.get("1") is form
    forms.refute()
    forms.note("1", form)
    assert forms.get("1") is None
    assert forms.is_refuted
    forms.clear()
    forms.note("1", form)
    assert forms.get("1") is form


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "usage": ({"stream_options": {"include_usage": True}}, ""),
    "an option of tomorrow": ({"stream_options": {"what": 1}}, rule.REQUEST),
    "options of another kind": ({"stream_options": 3}, rule.REQUEST),
    "no stream": ({"stream": False}, rule.NOT_STREAMED),
    "a stream of another kind": ({"stream": "yes"}, rule.NOT_STREAMED),
    "one token": ({"max_tokens": 1}, rule.ONE_TOKEN),
    "one chat token": ({"max_tokens": 8, "max_completion_tokens": 1}, rule.ONE_TOKEN),
    "a bound of another kind": ({"max_tokens": "8"}, rule.ONE_TOKEN),
    "two tokens": ({"max_tokens": 2, "max_completion_tokens": None}, ""),
    "defaults": (
        {"n": 1, "stop": [], "tools": [], "echo": False, "presence_penalty": 0.0, "logprobs": None},
        "",
    ),
    "text": ({"response_format": {"type": "text"}, "tool_choice": "none"}, ""),
    "how tokens are drawn": ({"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, ""),
    "a seed": ({"seed": 0}, rule.REQUEST),
    "log probabilities": ({"logprobs": 0}, rule.REQUEST),
    "a stop string": ({"stop": "x"}, rule.REQUEST),
    "echo": ({"echo": True}, rule.REQUEST),
    "tools": ({"tools": [{"type": "function"}]}, rule.REQUEST),
    "two samples": ({"n": 2}, rule.REQUEST),
    "what is new": ({"a_member_of_tomorrow": 1}, rule.REQUEST),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_a_request_may_ask_for(case: str) -> None:
    changes, expected = ASKED[case]
    assert refusal({**BODY, **changes}) == expected


def test_a_long_value_is_none_that_could_be_looked_at() -> None:
    for name, expected in (("prompt", ""), ("chat_template", rule.REQUEST)):
        raw = json.dumps({**BODY, name: "x" * LARGE_BODY_BYTES}).encode()
        taking_apart = members_of(raw)
        while True:
            try:
                next(taking_apart)
            except StopIteration as end:
                body = end.value
                break
        assert refusal(body) == expected
        if not expected:
            assert form_of(COMPLETIONS, body) == form_of(COMPLETIONS, BODY)


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_a_prefill_engine_must_answer(is_chat: bool) -> None:
    stream = Stream([(7, "a"), (8, "b")], is_chat=is_chat)
    endpoint, answer = endpoint_of(stream), stream.prefill_answer()
    params, (choice,) = answer["kv_transfer_params"], answer["choices"]
    own = choice["message"] if is_chat else choice

    def said(holder: dict[str, Any], **changes: Any) -> Any:
        before = dict(holder)
        holder.update(changes)
        try:
            return first_token_of(endpoint, BODY, answer)
        finally:
            holder.clear()
            holder.update(before)

    assert first_token_of(endpoint, BODY, answer) == first_of(stream)
    for token in (None, -1, "7", True):
        assert said(params, remote_first_token=token) == rule.NOT_OFFERED
    for goes_on in (None, False, 1):
        assert said(params, remote_first_token_goes_on=goes_on) == rule.ENDS
    assert first_token_of(endpoint, {**BODY, "stop_token_ids": [7]}, answer) == rule.ENDS
    assert said(choice, finish_reason="stop") == rule.TEXT
    assert said(answer, choices=[choice, choice]) == rule.TEXT
    assert said(answer, choices=None) == rule.TEXT
    assert said(answer, usage=None) == rule.TEXT
    assert said(answer, model=None) == rule.TEXT
    name = "content" if is_chat else "text"
    for text in (None, "", 3, "a\ufffd", "\ud800a"):
        assert said(own, **{name: text}) == rule.TEXT
    if is_chat:
        for changes in ({"reasoning": "a"}, {"tool_calls": [{}]}, {"content": " <think>"}):
            assert said(own, **changes) == rule.TEXT
    with_ids = {**BODY, "return_token_ids": True}
    assert first_token_of(endpoint, with_ids, answer) == rule.NOT_OFFERED
    for nothing in (None, [], {}, {"kv_transfer_params": 3}):
        assert first_token_of(endpoint, BODY, nothing) == rule.NOT_OFFERED


def test_what_a_token_is_drawn_by_is_told_but_for_what_the_request_says() -> None:
    answer = Stream([(1, "a"), (2, "b")]).prefill_answer()
    answer["kv_transfer_params"]["remote_sampling"] = "facts temperature=0.5 top_p=0.9 top_k=0"

    def drawn_by(**changes: Any) -> str:
        first = first_token_of(COMPLETIONS, {**BODY, **changes}, answer)
        assert isinstance(first, FirstToken)
        return first.drawn_by

    assert drawn_by(temperature=0.5) == "facts top_p=0.9 top_k=0"
    assert drawn_by(temperature=None, top_k=0) == "facts temperature=0.5 top_p=0.9"
    assert drawn_by(temperature=0) == ""
    answer["kv_transfer_params"]["remote_sampling"] = 3
    assert drawn_by(temperature=0.5) == ""


def test_an_engine_that_refuses_one_kind_of_token_takes_the_others() -> None:
    stream, forms = Stream([(1, "a"), (2, "b")]), Forms()
    form = learnt_from(stream)
    for kind in ("one", "other"):
        forms.note(kind, form)
    forms.refuse("one")
    forms.note("one", form)
    forms.refuse("one")
    assert forms.get("one") is form
    assert not forms.is_refused("one")
    forms.refuse("one")
    forms.note("one", form)
    assert forms.get("one") is None
    assert forms.is_refused("one")
    assert forms.get("other") is form
    assert not forms.is_refused("other")
    for number in range(MAX_FORMS):
        forms.refuse(str(number))
    assert not forms.is_refused("one")
    forms.refuse("0")
    forms.clear()
    assert not forms.is_refused("0")


def test_a_form_is_that_of_all_that_it_could_follow_from() -> None:
    same = [
        {},
        {"prompt": "another", "max_tokens": 9, "user": "u", "stop_token_ids": [3], "n": None},
    ]
    others = [
        *({"stream_options": {"include_usage": True}}, {"model": "other"}, {"n": 1}),
        *({"temperature": 0}, {"temperature": 0.5}, {"top_p": 0.5}, {"return_token_ids": True}),
    ]
    assert len({form_of(COMPLETIONS, {**BODY, **changes}) for changes in same}) == 1
    kinds = {form_of(COMPLETIONS, {**BODY, **changes}) for changes in [{}, *others]}
    assert len({*kinds, form_of(CHAT, BODY)}) == len(others) + 2
    drawn = [{**BODY, "temperature": value} for value in (0.5, 1)]
    assert form_of(COMPLETIONS, drawn[0]) == form_of(COMPLETIONS, drawn[1])
    assert form_of(COMPLETIONS, drawn[0], "facts") != form_of(COMPLETIONS, drawn[0], "others")


def test_a_stream_that_utf_8_cannot_write_teaches_nothing() -> None:
    stream = Stream([(1, "a"), (2, "b")])
    opening = b"".join(stream.events([1, 1])).replace(b'"model":"tiny"', b'"model":"\\ud800"')
    first = replace(first_of(stream), model="\ud800")
    assert learn(opening, HEADER, stream.request_id, first) is None
