"""Clients that ask for answers whose references are known, until they are told to stop."""

from __future__ import annotations

import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.judge import ERROR, LATE, RIGHT, WRONG, Answer, first, judge, verdict
from tests.chaos.schedule import BOUND_SECONDS, MAX_TOKENS
from tests.chaos.talk import Talk
from tests.kit.cluster import MODEL_NAME
from tests.kit.parity import Completion, complete
from tests.kit.prompts import PRINTABLE
from vllm_commext.errors import CommextError

WITHOUT_LOGPROBS = {"logprobs": None}
"""So that a stream whose engine is lost goes on from its tokens, and is not drawn anew."""
NOTHING: Mapping[str, Any] = {}
SEEDED: Mapping[str, Any] = {"temperature": 0.8}
"""With a seed beside it."""
MOST = 0.8
TALKS = 0.4
"""Of the requests, where there are conversations."""
NUM_ASKED = 4
SECONDS_A_TOKEN = 0.15
"""What each more than ``MAX_TOKENS`` may take, beside engines that start."""
LENGTHS = range(40, 300)
AFTER_ERROR_SECONDS = 0.25
MAX_ERROR_TEXT = 160
NUMBERS = re.compile(r"[0-9a-f-]{8,}|\d+")


def make_prompts(num_prompts: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [
        tuple(rng.choice(PRINTABLE) for _ in range(rng.choice(LENGTHS))) for _ in range(num_prompts)
    ]


@dataclass(frozen=True)
class Known:
    """A request whose right answer is known; ``extra`` is laid over it."""

    right: Completion
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def take_references(
    url: str,
    prompts: Sequence[tuple[int, ...]],
    num_tokens: int = MAX_TOKENS,
    model: str = "",
    *,
    seeds: bool = False,
) -> list[Known]:
    """The right answers, asked of a server that computes everything itself.

    Where a model is named every other one is asked of it; ``seeds``: the second half is drawn."""
    asked: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    for number, prompt in enumerate(prompts):
        drawn = {**SEEDED, "seed": number} if seeds and number >= len(prompts) // 2 else {}
        asked.append((prompt, {**drawn, **({"model": model} if model and number % 2 else {})}))

    def know(one: tuple[tuple[int, ...], dict[str, Any]]) -> Known:
        prompt, extra = one
        return Known(complete(url, MODEL_NAME, prompt, max_tokens=num_tokens, extra=extra), extra)

    with ThreadPoolExecutor(NUM_ASKED) as pool:
        return list(pool.map(know, asked))


def ask(url: str, prompt: Sequence[int], **options: object) -> Answer:
    """One request, whatever becomes of it."""
    started = time.monotonic()
    completion, error = None, ""
    arguments = {"max_tokens": MAX_TOKENS, "timeout_seconds": BOUND_SECONDS, **options}
    try:
        completion = complete(url, MODEL_NAME, prompt, **arguments)  # type: ignore[arg-type]
    except (CommextError, httpx.HTTPError, ValueError, KeyError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return Answer(time.monotonic() - started, completion, error)


@dataclass
class Load:
    """Constant load on the proxy by a few clients. With more than ``MAX_TOKENS`` as ``max_tokens``
    these are the shortest answers, and most of them are streams. ``least_seconds``: what an answer
    of ``MAX_TOKENS`` may take; ``salts``: what engines cache of a request is for no other one."""

    url: str
    known: Sequence[Known]
    seed: int
    max_tokens: int = MAX_TOKENS
    least_seconds: float = BOUND_SECONDS
    pause_seconds: float = 0.0
    salts: bool = False
    talks: Sequence[Talk] = ()
    verdicts: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[str] = field(default_factory=Counter[str])
    samples: list[str] = field(default_factory=list[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _go: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _busy: Counter[int] = field(default_factory=Counter[int])

    @property
    def references(self) -> list[Completion]:
        """Greedy answers of ``MAX_TOKENS`` tokens, without anything laid over their requests."""
        return [first(one.right, MAX_TOKENS) for one in self.known if not one.extra]

    @property
    def bound_seconds(self) -> float:
        return self.least_seconds + SECONDS_A_TOKEN * (self.max_tokens - MAX_TOKENS)

    def salted(self, extra: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
        return {**extra, **({"cache_salt": uuid.uuid4().hex} if self.salts else {})}

    def start(self, num_clients: int) -> None:
        """Begin with ``num_clients`` clients, each with one request at a time."""
        self._go.set()
        for number in range(num_clients):
            thread = threading.Thread(target=self._client, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def pause(self) -> bool:
        self._go.clear()
        deadline = time.monotonic() + self.bound_seconds + 1.0
        while self._busy.total() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._busy.total()

    def go_on(self) -> None:
        self._go.set()

    def stop(self) -> bool:
        self._stop.set()
        self._go.set()
        deadline = time.monotonic() + self.bound_seconds + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def note(self, reference: Completion, answer: Answer) -> str:
        """Judge and count an answer; also for requests that a fault sends itself."""
        found = judge(reference, answer, self.bound_seconds)
        self._count(found, answer.error, lambda: _describe(found, reference, answer))
        return found

    def _count(self, found: str, error: str, describe: Callable[[], str]) -> None:
        with self._lock:
            self.verdicts[found] += 1
            if found == ERROR:
                self.errors[NUMBERS.sub("#", " ".join(error.split()))[:MAX_ERROR_TEXT]] += 1
            if found in (WRONG, LATE):
                self.samples.append(describe())

    def _client(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while not self._stop.is_set():
            if not self._go.wait(0.2):
                continue
            self._busy[number] = 1
            found = self._ask(rng) if self._go.is_set() else RIGHT
            self._busy[number] = 0
            self._stop.wait(self.pause_seconds if found == RIGHT else AFTER_ERROR_SECONDS)

    def _ask(self, rng: random.Random) -> str:
        if self.talks and rng.random() < TALKS:
            return self._talk(rng)
        known = rng.choice(self.known)
        stream = rng.random() < (0.5 if self.max_tokens == MAX_TOKENS else MOST)
        extra = {**known.extra, **(WITHOUT_LOGPROBS if stream and rng.random() < 0.5 else {})}
        num_tokens = rng.randint(MAX_TOKENS, self.max_tokens)
        answer = ask(
            self.url,
            known.right.prompt,
            stream=stream,
            extra=self.salted(extra),
            max_tokens=num_tokens,
            timeout_seconds=self.bound_seconds,
        )
        return self.note(first(known.right, num_tokens), answer)

    def _talk(self, rng: random.Random) -> str:
        talk, started = rng.choice(self.talks), time.monotonic()
        text, error = "", ""
        try:
            ask_talk = talk.ask_whole if rng.random() < 0.5 else talk.ask
            text = ask_talk(self.url, self.bound_seconds)
        except (CommextError, httpx.HTTPError, ValueError, KeyError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.monotonic() - started
        found = verdict(talk.is_right(text), error, seconds, self.bound_seconds)
        self._count(
            *(found, error), lambda: f"{found} after {seconds:.1f} s: {talk}, got {text or error!r}"
        )
        return found


def _describe(verdict: str, reference: Completion, answer: Answer) -> str:
    got = answer.completion.token_ids if answer.completion is not None else answer.error
    return (
        f"{verdict} after {answer.seconds:.1f} s: prompt of {len(reference.prompt)} tokens, "
        f"expected {reference.token_ids}, got {got}"
    )
