"""Streams of chats that go on at another engine, through vLLM's API server and each of its tool and
reasoning parsers: lost after any token, a client gets what one server would have sent.

That is a server which takes each token when it comes. A slow one takes several at once, of which
some of vLLM's parsers make something else; then the next engine gets them in the same pieces.
`OutputProcessor.add_request` and `OutputProcessor.process_outputs` are patched for it."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import generate_docs
import pytest
from packaging.version import Version
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.output_processor import RequestOutputCollector

from tests.kit.installed import VLLM
from tests.kit.parsed_streams import Api, tokenizer_of, told
from tests.kit.parser_texts import (
    ALIKE,
    CALLS,
    CALLS_ALONE,
    CONTENT,
    NOT_DRIVEN,
    ONE_CALL,
    OTHER_MARKS,
    PIECES,
    REASONING,
    REASONING_MARKS,
    TEMPLATE,
    THINK,
    TOOL_TEXTS,
    TOOLS,
)
from vllm_commext.compat import resumed_answers
from vllm_commext.compat.fits import NEWEST
from vllm_commext.proxy.http.answer_events import Cached, with_cached_tokens
from vllm_commext.proxy.session.resumable_stream import Room, Transcript

PAGE = generate_docs.ROOT / "docs" / "proxy.md"
ROOM_BYTES = 1 << 20
FIRST_ID = re.compile(rb'"prompt_token_ids":\[(\d+)')
FROM_A_CLOCK = re.compile(rb'"created":\d+|"id":"[^"]*"')
THINKING = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
SAMPLED = {"step3", "deepseek_v3", "deepseek_v31", "hunyuan_a13b", "deepseek_r1", "holo2", "hy_v4"}
"""Parsers that answered otherwise, or not, when all tokens came at once."""
UNREAD = {"phi4_mini_json", "minimax_m2_append_think"}
"""vLLM tells no calls of the one in a stream, and no reasoning of the other."""


@dataclass(frozen=True)
class Case:
    """An answer's text, and the parsers that read it."""

    kind: str
    text: str
    tool: str | None = None
    reasoning: str | None = None
    prompt: str = "<|assistant|>"

    @property
    def parser(self) -> str:
        return self.reasoning or self.tool or ""

    def api(self) -> Api:
        tokenizer = tokenizer_of((self.prompt, self.text, OTHER_MARKS), PIECES.get(self.parser, ()))
        tokenizer.response_template = TEMPLATE
        body = {"chat_template_kwargs": THINKING, **({"tools": TOOLS} if self.tool else {})}
        return Api(tokenizer, self.tool, self.reasoning, body, self.prompt)


def driven(manager: Any) -> list[str]:
    return sorted(set(manager.list_registered()) - NOT_DRIVEN.keys())


def tool_cases() -> Iterator[Case]:
    for name in driven(ToolParserManager):
        before = "" if name in CALLS_ALONE else CONTENT
        for kind, calls in CALLS.items():
            text = before + TOOL_TEXTS[name](calls[:1] if name in ONE_CALL else calls)
            yield Case(kind, text, name)


def reasoning_cases() -> Iterator[Case]:
    tools = driven(ToolParserManager)
    for name in driven(ReasoningParserManager):
        opening, closing = REASONING_MARKS.get(name, THINK)
        rest = f"{REASONING}{closing}{CONTENT}"
        yield Case("begun by the model", opening + rest, None, name)
        yield Case("begun in the prompt", rest, None, name, f"<|assistant|>{opening}")
        if name in tools:
            calls = TOOL_TEXTS[name](CALLS[ALIKE][:1])
            yield Case("with a call", opening + rest + calls, name, name)


CASES = [*tool_cases(), *reasoning_cases()]


@dataclass
class Tally:
    """places: where a stream was lost. refused: parsers of those that ended with an error."""

    places: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    resumed_answers.install()


def one_by_one(case: Case) -> list[list[int]]:
    return [[token] for token in case.api().tokens_of(case.text)]


def of_a_slow_server(case: Case, dice: random.Random) -> list[list[int]]:
    pieces: list[list[int]] = []
    for (token,) in one_by_one(case):
        if pieces and dice.random() < 0.3:
            pieces[-1].append(token)
        else:
            pieces.append([token])
    return pieces


def lose(case: Case, pieces: Sequence[Sequence[int]], tally: Tally, most: int = 1000) -> None:
    """Lose a stream after each piece, or *most* of them, to a cut connection and in a drain."""
    api = case.api()
    whole = api.events(pieces)
    expected = told(whole)
    if "error" in expected["ends"]:
        return  # vLLM's parser takes no two tokens at once
    is_open = case.kind == "begun in the prompt" or case.parser in UNREAD
    assert is_open or expected["reasoning" if case.reasoning else "calls"]
    dice = random.Random(case.text)
    places = range(1, len(pieces) + 1)
    for place in dice.sample(places, min(most, len(places))):
        transcript = Transcript(Room(ROOM_BYTES), api.body, 0)
        got = transcript.pass_on(b"".join(whole[: place + 1]))
        asked = transcript.asking({})["kv_transfer_params"]
        rest = api.events(pieces, asked, place)
        trial = transcript.trial()  # of a drain, which goes on if it has not failed
        for event in rest:
            if trial.is_behind:
                trial.pass_on(event)
        transcript.begin_again()
        got += b"".join(map(transcript.pass_on, rest))
        assert trial.has_failed == transcript.has_failed
        tally.places += 1
        if transcript.has_failed:
            tally.refused.append(case.parser)
        elif (found := told([got])) != expected:
            where = f"{case.parser}, {case.kind}, {place} of {len(pieces)}"
            tally.wrong.append(f"{where}: expected {expected}, got {found}")


def test_each_parser_is_driven_or_named_with_the_reason() -> None:
    for manager, texts in ((ToolParserManager, TOOL_TEXTS), (ReasoningParserManager, CASES)):
        known = set(texts) if isinstance(texts, dict) else {case.parser for case in texts}
        assert set(manager.list_registered()) <= known | NOT_DRIVEN.keys()


def test_streams_lost_after_some_tokens() -> None:
    tally, dice = Tally(), random.Random(0)
    for case in CASES:
        if case.parser in SAMPLED or dice.random() < 0.2:
            lose(case, one_by_one(case), tally, most=2)
            lose(case, of_a_slow_server(case, dice), tally, most=1)
    assert tally.places > 100
    assert (tally.refused, tally.wrong) == ([], [])


@pytest.mark.parametrize("given", [0, 3])
def test_a_chats_first_event_tells_what_computes_it_and_the_rest_is_as_without(given: int) -> None:
    """Also before parsers that read the prompt's ids, and where the answer is resumed."""
    for case in [one for one in CASES if one.reasoning in ("hf", "deepseek_r1")]:
        api, pieces = case.api(), one_by_one(case)
        params = {"answer_token_ids": sum(pieces[:given], [])} if given else None
        plain = api.events(pieces, params, given)
        api.mark = 1 << 63
        marked = api.events(pieces, params, given)
        ids = [int(FIRST_ID.findall(events[0])[0]) for events in (plain, marked)]
        assert ids == [api._prompt_ids[0], api._prompt_ids[0] + (1 << 95)]
        transcript = Transcript(Room(ROOM_BYTES), {"return_token_ids": True}, 0)
        edited = transcript.edit(b"".join(marked))
        assert FROM_A_CLOCK.sub(b"", edited or b"") == FROM_A_CLOCK.sub(b"", b"".join(plain))


def test_each_number_of_tokens_in_a_cache_is_the_prefill_engines() -> None:
    """Those of another kind that vLLM adds to a usage are not known, and fail here."""
    fields = PromptTokenUsageInfo.model_fields
    assert fields.keys() <= {*Cached._fields, "multimodal_tokens"}
    wrong = dict.fromkeys(fields.keys() & set(Cached._fields), 1)
    usage = UsageInfo(prompt_tokens_details=PromptTokenUsageInfo(**wrong)).model_dump_json()
    mended = UsageInfo.model_validate_json(with_cached_tokens(usage.encode(), Cached(7, 9)))
    right = dict(zip(Cached._fields, (7, 9), strict=True))
    assert mended.prompt_tokens_details == PromptTokenUsageInfo(**{k: right[k] for k in wrong})


def output(token: int) -> RequestOutput:
    return RequestOutput(
        "one", None, [], None, [CompletionOutput(0, "", [token], None, None)], False
    )


def test_a_slow_client_gets_repeated_pieces_apart_and_later_tokens_at_once() -> None:
    """Others have their turns between the pieces; an error comes in the place of what is left."""
    params = {"kv_transfer_params": {"answer_token_ids": [1, 2]}}
    request = SimpleNamespace(request_id="one", sampling_params=SimpleNamespace(extra_args=params))
    queue: Any = RequestOutputCollector(RequestOutputKind.DELTA, "one")
    resumed_answers.expect(request, queue)
    for token in (1, 2, 3, 4):
        queue.is_repeating = token < 3
        queue.put(output(token))
    taken: list[list[int]] = []
    turns: list[int] = []

    async def take() -> None:
        asyncio.get_running_loop().call_soon(lambda: turns.append(len(taken)))
        while queue.ready.is_set():
            got = queue.get_nowait() or await queue.get()
            taken.append(list(got.outputs[0].token_ids))

    asyncio.run(take())
    assert (taken, turns) == ([[1], [2], [3, 4]], [0])
    queue.put(output(5))
    queue.put(ValueError("lost"))
    queue.put(output(6))
    with pytest.raises(ValueError, match="lost"):
        queue.get_nowait()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_streams_lost_after_every_token() -> None:
    """Writes the table of docs/proxy.md, and fails where it had other numbers."""
    rows: list[tuple[str, ...]] = []
    for kind, cases in (("tool calls", [*tool_cases()]), ("reasoning", [*reasoning_cases()])):
        tally, names = Tally(), {case.parser for case in cases}
        for case in cases:
            lose(case, one_by_one(case), tally)
            lose(case, of_a_slow_server(case, random.Random(case.text)), tally)
        assert tally.wrong == []
        assert len(tally.refused) < tally.places / 100, Counter(tally.refused)
        numbers = (len(names), tally.places, len(tally.wrong), len(tally.refused))
        rows.append((kind, *(f"{number:,}" for number in numbers)))
    if Version(NEWEST) > VLLM:
        return
    heads = ("parsers of", "number", "places", "wrong", "ended with an error")
    text, made = PAGE.read_text(), generate_docs.table(heads, rows)
    new = generate_docs.with_table(text, "parsers", made, by="make long")
    PAGE.write_text(new)
    assert new == text, f"{PAGE} is written"
