"""A request's phases in the proxy are those that the documentation draws, whatever engines do."""

import asyncio
import random
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.proxy.test_resume import CHAT, ROOM_BYTES
from vllm_commext.proxy import errors_phases as outcome
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.engines.engine import Engine
from vllm_commext.proxy.errors_phases import ClientGoneError, Life, Outcome, Phase, ProxyError
from vllm_commext.proxy.session import restart_resume_move as session
from vllm_commext.proxy.session.relay import Ended, Left, Lost
from vllm_commext.proxy.session.restart_resume_move import Session
from vllm_commext.proxy.session.resumable_stream import Room

DOCS = Path(__file__).parents[3] / "docs" / "design" / "requests.md"
SECTION = DOCS.read_text().split("## In the proxy")[1]
DRAWN = [
    [cell.strip() for cell in row.split("|")[1:-1]]
    for row in re.findall(r"^\|.*$", SECTION, re.MULTILINE)[2:]
]
WAYS = {(old, new) for several, new, _ in DRAWN for old in several.split(", ")}


def test_the_page_draws_each_move() -> None:
    assert {(old.value, new.value) for old in Phase for new in outcome.MOVES[old]} == WAYS


def error(kind: str) -> ProxyError:
    can = kind != "final"
    return ProxyError(502, kind, kind, side="decode", engine="decode0", can_restart=can)


class Story:
    """What engines and the client do, by the dice; after a while all goes well."""

    def __init__(self, seed: int) -> None:
        self._dice, self._num_left = random.Random(seed), 30
        self.num_opened = self.num_closed = 0

    def next(self, *known: str) -> str:
        self._num_left -= 1
        return self._dice.choice(known) if self._num_left > 0 else known[0]

    def opened(self) -> Any:
        """An answer that has begun, or what else comes of an attempt."""
        step = self.next("answers", "fails", "refuses", "client goes", "no stream")
        if step in ("fails", "refuses"):
            raise error("lost" if step == "fails" else "final")
        if step == "client goes":
            raise ClientGoneError
        self.num_opened += 1
        engine = Engine("decode", "decode0", "http://d")
        return SimpleNamespace(
            engine=engine, response=SimpleNamespace(status=200), opened_at=0.0, answer=None,
            cutter=None if step == "no stream" else object(), close=self._close,
        )  # fmt: skip

    def _close(self) -> None:
        self.num_closed += 1


class StoryAttempt:
    def __init__(self, story: Story) -> None:
        self.story, self.route, self.plan = story, Outcome("").route, None
        self.local_reason = None if story.next("two steps", "one step") == "two steps" else "x"

    def choose(self) -> None: ...

    async def prefill(self) -> Any:
        return self.story.opened() if self.story.next("waits", "at once") == "at once" else None

    async def decode(self, changes: Any = None) -> Any:
        return self.story.opened()

    def hand_over(self, opened: Any) -> float | None:
        return None

    def note_opened(self, opened: Any) -> None: ...

    def release(self) -> None: ...

    def blame(self, failure: ProxyError) -> None: ...


class StoryRelay:
    def __init__(self, story: Story) -> None:
        self.story, self.has_sent_end, self.response = story, False, None

    async def send(self, opened: Any) -> Any:
        step = self.story.next("ends", "is lost", "leaves", "is refused", "client goes")
        if step == "client goes":
            raise ClientGoneError
        if step == "leaves" and opened.cutter is not None:
            return Left()
        return Lost(error("lost" if step == "is lost" else "final")) if "is" in step else Ended()

    async def catch_up(self, *_: Any) -> Any:
        return session.Resume.DIFFERS if self.story.next("", "differs") else None

    async def end_broken(self, *_: Any) -> None: ...


def begun(story: Story, monkeypatch: pytest.MonkeyPatch) -> Session:
    counted: Any = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=int, observe=float))
    answers = SimpleNamespace(
        **dict.fromkeys(
            ("restarts", "resumes", "moves", "first_token_seconds", "request_seconds"), counted
        ),
        gaps=None, move_seconds=SimpleNamespace(observe=float),
    )  # fmt: skip
    upstream = SimpleNamespace(decode_pool=SimpleNamespace(engines=()))
    config = ProxyConfig(("http://p",), ("http://d",))
    service: Any = SimpleNamespace(
        config=config,
        room=Room(ROOM_BYTES),
        metrics=SimpleNamespace(answers=answers),
        upstream=upstream,
        bulk=None,
    )
    monkeypatch.setattr(session, "Relay", lambda *_: StoryRelay(story))
    monkeypatch.setattr(session, "response_to", lambda *_: None)
    monkeypatch.setattr(session, "Attempt", lambda *_, route: StoryAttempt(story))
    return Session(service, Outcome("r"))


seen: set[tuple[str, str]] = set()


async def serve(seed: int) -> None:
    story, taken = Story(seed), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        one = begun(story, monkeypatch)
        enter, asked = Life.enter, SimpleNamespace(path=CHAT, headers={})

        def entering(life: Life, phase: Phase, engine: str = "") -> None:
            taken.append((life.phase.value, phase.value))
            enter(life, phase, engine)

        monkeypatch.setattr(Life, "enter", entering)
        with suppress(ProxyError, ClientGoneError):
            body = {"messages": [], "stream": True}
            await one.serve(asked, body, {}, 9, lambda: None)  # type: ignore
    assert one.life.phase is Phase.DONE
    assert set(taken) <= WAYS
    assert [new for _, new in taken[:-1]] == [old for old, _ in taken[1:]]
    assert story.num_closed >= story.num_opened, "each engine is let go"
    seen.update(taken)


def test_a_request_goes_along_the_drawn_ways_alone_and_comes_to_an_end() -> None:
    for seed in range(400):
        asyncio.run(serve(seed))
    assert seen == WAYS
