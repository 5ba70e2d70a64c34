"""What clients, engines or sources of engines send is taken in a piece at a time."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.request_bodies import run
from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines import health_and_metrics as health
from vllm_commext.proxy.engines.discovery import (
    MAX_CHANGED,
    MAX_ENGINES,
    EngineEndpoint,
    Registry,
    Sources,
)
from vllm_commext.proxy.engines.engine import ROLES, EnginePool
from vllm_commext.proxy.errors_phases import Resume
from vllm_commext.proxy.http import answer_events as answers
from vllm_commext.proxy.http import json_members as body
from vllm_commext.proxy.http.json_members import decode, members_of
from vllm_commext.proxy.session import resumable_stream as transcript
from vllm_commext.proxy.session.resumable_stream import MAX_EVENT_BYTES, Room, Transcript

LARGE = 1 << 20
HARD: dict[str, bytes] = {
    "lists": b"[" + b"[]," * (LARGE // 3) + b"[]]",
    "objects": b"[" + b"{}," * (LARGE // 3) + b"{}]",
    "ids": b"[" + b"123456," * (LARGE // 7) + b"1]",
    "names": b"{" + b",".join(b'"%d":[1,"a"]' % n for n in range(60_000)) + b"}",
    "string": b'"' + b"w" * LARGE + b'"',
    "surrogates": b'"' + b"\\ud800" * (LARGE // 6) + b'"',
}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece of JSON that is decoded."""
    lengths = [0]

    def noting(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def noted(text: bytes) -> Any:
            lengths.append(len(text))
            return read(text)

        return noted

    for module in (answers, body, transcript):
        monkeypatch.setattr(module, "decode", noting(decode))
    reader = SimpleNamespace(decode=noting(transcript._DECODER.decode))
    monkeypatch.setattr(transcript, "_DECODER", reader)
    return lengths


TEXT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
IDS = b'data: {"choices":[{"text":"a b c","prompt_token_ids":%s,"token_ids":[7,8,9]}]}\n\n'


@pytest.mark.parametrize(
    ("piece", "num_tokens"),
    [
        (TEXT * 2, 2),
        (IDS % b"null", 3),
        (IDS % b"[1,2]" + TEXT, 4),
        (b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n', 0),
    ],
)
def test_an_event_has_as_many_tokens_as_ids(piece: bytes, num_tokens: int) -> None:
    """With speculation it has those of a step."""
    assert answers.num_tokens(piece) == num_tokens


@pytest.mark.parametrize("name", HARD)
def test_little_of_an_answer_is_decoded_in_one_piece(name: str, decoded: list[int]) -> None:
    """Whole ones, beginnings of streams, and a prefill engine's."""
    for answer in (HARD[name], b'{"choices": %s}' % HARD[name], b'{"x": %s}' % HARD[name]):
        assert answers.lack_of(answers.CHOICES, answer)
        assert not answers.is_aborted(answer)
    event = b'data: {"choices": [{"finish_reason": "abort", "error": %s}]}\n\n' % HARD[name]
    is_read = name == "ids"  # without which it is short
    assert (answers.says_nothing(event), answers.opens_aborted(event)) == (is_read, is_read)
    assert answers.opening_error(event) is None
    run(members_of(b'{"kv_transfer_params": {"remote_block_ids": %s}}' % HARD[name]))
    assert max(decoded) <= MAX_EVENT_BYTES


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("before", [b'"text":"a",', b'"delta":{"content":"a"},', b""])
def test_little_of_an_event_is_decoded(name: str, before: bytes, decoded: list[int]) -> None:
    """In the place of each member of a choice, at first and behind ordinary events."""
    for member in (b"x", b"text", b"delta", b"logprobs", b"token_ids"):
        told = b'{"id":"c","choices":[{"index":0,%s"token_ids":[1],"%s":%s}]}'
        event = b"data: " + told % (before, member, HARD[name]) + b"\n\n"
        plain = b"data: " + told % (before, b"x", b"1") + b"\n\n"
        for events in ((event,), (plain, plain, event, plain)):
            one = Transcript(Room(1 << 28), {"return_token_ids": True}, 100)
            assert [one.pass_on(part) for part in events] == [*events]
            assert one.refusal is Resume.NOT_TOLD
    assert max(decoded) <= MAX_EVENT_BYTES


class Page:
    """An answer that comes in pieces, as long as anything is read of it."""

    def __init__(self, line: bytes, num_lines: int) -> None:
        self._piece, self._num_left = line * (65_536 // len(line)), num_lines
        self.num_bytes = 0

    async def iter_any(self) -> Any:
        while self._num_left > 0:
            self._num_left -= 65_536
            self.num_bytes += len(self._piece)
            yield self._piece


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:other{engine="0",name="x"} 1.0\n',
        b'vllm:cache_config_info{engine="0"} 1.0\n',
        b"x" * 65_536,
        b"\n",
    ],
)
async def test_a_metrics_page_without_end_is_read_to_a_limit(line: bytes) -> None:
    page: Any = Page(line, 1 << 30)
    with pytest.raises(ValueError, match="expected a metrics page of at most"):
        await health._wanted(page)
    assert page.num_bytes <= health.MAX_PAGE_BYTES + 65_536


async def test_a_large_page_gives_what_is_wanted() -> None:
    wanted = b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'

    class Both(Page):
        async def iter_any(self) -> Any:
            async for piece in super().iter_any():
                yield piece
            for number in range(len(wanted)):
                yield wanted[number : number + 1]

    page: Any = Both(b'vllm:other{engine="0"} 1.0\n', 3_000_000)
    assert await health._wanted(page) == wanted.decode()


def named(count: int) -> list[EngineEndpoint]:
    return [
        EngineEndpoint("decode", f"http://10.0.{one >> 8}.{one & 255}:1") for one in range(count)
    ]


async def test_many_engines_come_and_go_a_few_at_a_time() -> None:
    registry = Registry({role: EnginePool(role) for role in ROLES})
    sources = Sources(ProxyConfig(prefill=("http://p:1",), decode=("http://d:1",)), registry)
    counts: list[int] = []

    async def of(places: list[EngineEndpoint]) -> list[EngineEndpoint]:
        return places

    async def watch() -> None:
        while True:
            counts.append(len(registry.engines))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await sources._name("file", of(named(MAX_ENGINES - 2)))
    assert len(registry.engines) == MAX_ENGINES
    await sources._name("file", of(named(MAX_ENGINES - 1)))  # one too many: the list stays
    assert len(registry.engines) == MAX_ENGINES
    await sources._name("file", of(named(1)))
    while registry.sweep():
        await asyncio.sleep(0)
    assert len(registry.engines) == 3
    watching.cancel()
    assert max(abs(after - before) for before, after in pairwise(counts)) <= MAX_CHANGED
    with pytest.raises(ConfigError, match="at most 1024 engines"):
        registry.name("admin", named(4000))
