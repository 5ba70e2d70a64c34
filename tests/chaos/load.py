"""Clients that ask for answers whose references are known, until they are told to stop."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.chaos.judge import ERROR, LATE, RIGHT, WRONG, Answer, judge
from tests.chaos.testbed import BOUND_SECONDS
from tests.kit.cluster import MODEL_NAME
from tests.kit.parity import Completion, complete
from tests.kit.prompts import PRINTABLE
from vllm_commext.errors import CommextError

MAX_TOKENS = 24
WITHOUT_LOGPROBS = {"logprobs": None}
"""So that a stream whose engine is lost goes on from its tokens, and is not drawn anew."""
LENGTHS = range(40, 300)
AFTER_ERROR_SECONDS = 0.25
MAX_ERROR_TEXT = 160
NUMBERS = re.compile(r"[0-9a-f-]{8,}|\d+")


def make_prompts(num_prompts: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of random lengths and tokens."""
    rng = random.Random(seed)
    return [
        tuple(rng.choice(PRINTABLE) for _ in range(rng.choice(LENGTHS))) for _ in range(num_prompts)
    ]


def take_references(url: str, prompts: Sequence[tuple[int, ...]]) -> list[Completion]:
    """The right answers, asked one by one of a server that computes everything itself."""
    return [complete(url, MODEL_NAME, prompt, max_tokens=MAX_TOKENS) for prompt in prompts]


def ask(url: str, prompt: Sequence[int], **options: object) -> Answer:
    """One request, whatever becomes of it."""
    started = time.monotonic()
    completion, error = None, ""
    arguments = {"max_tokens": MAX_TOKENS, "timeout_seconds": BOUND_SECONDS, **options}
    try:
        completion = complete(url, MODEL_NAME, prompt, **arguments)  # type: ignore[arg-type]
    except (CommextError, httpx.HTTPError, ValueError, KeyError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return Answer(started, time.monotonic() - started, completion, error)


@dataclass
class Load:
    """Constant load on the proxy by a few clients.

    Attributes:
        url: the proxy.
        references: the right answers, each with its prompt.
        seed: for the order of the requests.
        verdicts: answers by verdict.
        errors: error answers by what they said, shortened.
        samples: details of wrong and late answers.
        spans: start and end of each request, in seconds of ``time.monotonic``.
    """

    url: str
    references: Sequence[Completion]
    seed: int
    verdicts: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[str] = field(default_factory=Counter[str])
    samples: list[str] = field(default_factory=list[str])
    spans: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _go: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _busy: Counter[int] = field(default_factory=Counter[int])

    def start(self, num_clients: int) -> None:
        """Begin with ``num_clients`` clients, each with one request at a time."""
        self._go.set()
        for number in range(num_clients):
            thread = threading.Thread(target=self._client, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def pause(self) -> bool:
        """Let all running requests end and send none; whether they have ended in time."""
        self._go.clear()
        deadline = time.monotonic() + BOUND_SECONDS + 1.0
        while self._busy.total() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._busy.total()

    def go_on(self) -> None:
        """Send requests again."""
        self._go.set()

    def stop(self) -> bool:
        """End all clients; whether they have ended in time."""
        self._stop.set()
        self._go.set()
        deadline = time.monotonic() + BOUND_SECONDS + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def note(self, reference: Completion, answer: Answer, bound: float = BOUND_SECONDS) -> str:
        """Judge and count an answer; also for requests that a fault sends itself."""
        verdict = judge(reference, answer, bound)
        with self._lock:
            self.verdicts[verdict] += 1
            self.spans.append((answer.started, answer.started + answer.seconds))
            if verdict == ERROR:
                self.errors[_shortened(answer.error)] += 1
            if verdict in (WRONG, LATE):
                self.samples.append(_describe(verdict, reference, answer))
        return verdict

    def _client(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while not self._stop.is_set():
            if not self._go.wait(0.2):
                continue
            self._busy[number] = 1
            if self._go.is_set():
                reference = rng.choice(self.references)
                stream = rng.random() < 0.5
                extra = WITHOUT_LOGPROBS if stream and rng.random() < 0.5 else None
                answer = ask(self.url, reference.prompt, stream=stream, extra=extra)
                verdict = self.note(reference, answer)
            else:
                verdict = RIGHT
            self._busy[number] = 0
            if verdict != RIGHT:
                self._stop.wait(AFTER_ERROR_SECONDS)


def _shortened(text: str) -> str:
    """The error without what differs from request to request."""
    return NUMBERS.sub("#", " ".join(text.split()))[:MAX_ERROR_TEXT]


def _describe(verdict: str, reference: Completion, answer: Answer) -> str:
    got = answer.completion.token_ids if answer.completion is not None else answer.error
    return (
        f"{verdict} after {answer.seconds:.1f} s: prompt of {len(reference.prompt)} tokens, "
        f"expected {reference.token_ids}, got {got}"
    )
