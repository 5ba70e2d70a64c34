"""How a request goes and ends, and what can go wrong with it."""

import errno
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

from vllm_commext.errors import CommextError, Reason
from vllm_commext.limited_log import RateLimitedLog

complaints = RateLimitedLog(logging.getLogger("vllm.commext.proxy"))
SIDE = "X-Commext-Side"
SIDE_PROXY = "proxy"
ENGINES_LOST = "engines_lost"
FINE = ("ok", "client_gone", "bad_request", "refused", "unauthorized", "shutdown")
# What this host or process lacks, and no engine can help.
_LACKS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))
TWO_STEP = "two-step"
STREAMED = "streamed"
LOCAL_PREFILL = "local-prefill"
DIRECT = "direct"
LOCAL, HANDED_OVER, LEAST_WORK = KINDS = ("local", "handed_over", "least_work")
"""Kinds of placement."""


@dataclass(frozen=True)
class EngineAnswer:
    """An engine's own answer, passed on as it is, with its type and CORS headers."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


@dataclass(eq=False, repr=False)
class ProxyError(CommextError):
    """Ends a request: HTTP *status*, a *kind* (a metric label), and the *side* at fault.

    can_retry: another engine may be asked the same. can_restart: the request may be served again
    from its first step: the engine failed it, and the client has seen nothing.
    """

    status: int
    kind: str
    message: InitVar[str]
    _: KW_ONLY
    side: str = SIDE_PROXY
    engine: str | None = None
    can_retry: bool = False
    can_restart: bool = False
    answer: EngineAnswer | None = None

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def be_final(self, *, may_restart: bool = True) -> None:
        self.can_retry, self.can_restart = False, self.can_restart and may_restart

    def in_a_stream(self) -> dict[str, Any]:
        """Error object for a stream that has begun: the engine's own, if it is one."""
        try:
            told = json.loads(self.answer.body) if self.answer else None
        except (ValueError, RecursionError):
            told = None
        return told if isinstance(told, dict) and "error" in told else self.as_json()

    def as_json(self) -> dict[str, Any]:
        """OpenAI's error object, with side and engine."""
        told = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return {"error": {**told, "side": self.side, "engine": self.engine}}


def bad_request(message: str) -> ProxyError:
    return ProxyError(400, "bad_request", message)


def no_answer(name: Any, reason: str) -> ProxyError:
    """Error of a request that goes on from an answer which is not there, as vLLM says it."""
    message = (
        f"Response with id {str(name)[:128]!r} not found: {reason}; send the conversation as input"
    )
    error = {"message": message, "type": "invalid_request_error", "param": "response_id"}
    body = json.dumps({"error": {**error, "code": 404}}).encode()
    return ProxyError(404, "bad_request", message, answer=EngineAnswer(body))


class ClientGoneError(CommextError):
    """The client closed its connection or takes no more bytes."""


Mark = tuple[float, str, str]
"""A moment of a request: `time.monotonic`, a phase or one of those below, and the engine or ""."""
PREFILL_ASKED, PREFILLED = "prefill asked", "prefilled"
DECODE_ASKED, DECODE_ANSWERS = "decode asked", "decode answers"


class Phase(Reason):
    ASKED = "asked", "no engine works on it"
    PLANNED = "planned", "its engines are chosen; a decode engine may be computing all of it"
    PREFILLING = ("prefilling", "a prefill engine computes the prompt; a decode engine may read it")
    OPENED = "opened", "a decode engine has begun to answer"
    RELAYING = "relaying", "the client gets the answer"
    MOVING = "moving", "the answer has stopped, while another decode engine repeats it"
    DONE = "done", "the client has the answer or an error, or has gone"


_A, _P, _F, _O, _R, _M, _D = Phase
MOVES: Mapping[Phase, frozenset[Phase]] = {
    _A: frozenset((_P, _D)),
    _P: frozenset((_A, _F, _O, _D)),
    _F: frozenset((_A, _O, _D)),
    _O: frozenset((_R, _D)),
    _R: frozenset((_A, _M, _D)),
    _M: frozenset((_R, _D)),
    _D: frozenset(),
}


class Life:
    """A request's phase, each with its mark. Raises `RuntimeError` for a move that there is not."""

    phase = Phase.ASKED

    def __init__(self, marks: list[Mark]) -> None:
        self._marks = marks

    def enter(self, phase: Phase, engine: str = "") -> None:
        if phase not in MOVES[self.phase]:
            raise RuntimeError(f"a request that is {self.phase} cannot be {phase} next")
        self.phase = phase
        self._marks.append((time.monotonic(), phase, engine))


_PARTS = ("queue", "prefill", "ask", "first token", "decode", "move")
_QUEUE, _PREFILL, _ASK, _FIRST_TOKEN, _DECODE, _MOVE = _PARTS


Part = tuple[str, str, float, float]
"""Of a request: its name, its engine's or "", and when it began and ended by `time.monotonic`."""
_ENDS: dict[str, tuple[str, ...]] = {
    PREFILL_ASKED: (_QUEUE,),
    PREFILLED: (_PREFILL,),
    DECODE_ASKED: (_QUEUE, _ASK, _FIRST_TOKEN),
    DECODE_ANSWERS: (_ASK,),
    Phase.OPENED: (_QUEUE, _ASK, _FIRST_TOKEN),
    Phase.RELAYING: (_ASK, _FIRST_TOKEN, _MOVE),
    Phase.MOVING: (_DECODE,),
    Phase.ASKED: _PARTS,
    Phase.DONE: _PARTS,
}
_BEGINS = {PREFILL_ASKED: _PREFILL, DECODE_ASKED: _ASK, DECODE_ANSWERS: _FIRST_TOKEN}
_BEGINS |= {Phase.RELAYING: _DECODE, Phase.MOVING: _MOVE, Phase.ASKED: _QUEUE}


def parts_of(began: float, marks: Iterable[Mark]) -> list[Part]:
    """All parts, as they ended.  A part that has not ended is left out."""
    running, found = {_QUEUE: (began, "")}, list[Part]()
    for at, what, engine in marks:
        for name in _ENDS.get(what, ()):
            if name in running:
                since, asked = running.pop(name)
                found.append((name, asked, since, at))
        if (name := _BEGINS.get(what)) is not None:
            running[name] = at, engine
    return found


@dataclass
class Route:
    """Engines that an attempt asked. path: one of `TWO_STEP`, `STREAMED`, `LOCAL_PREFILL`,
    `DIRECT`. ways: kinds of placement, the chosen one first, each with the seconds expected to the
    first token and for each other. marks: of all attempts."""

    path: str = ""
    prefill: str = ""
    decode: str = ""
    placement: str = ""
    ways: tuple[tuple[str, float, float], ...] = ()
    marks: list[Mark] = field(default_factory=list[Mark])


@dataclass(eq=False)
class Outcome:
    """Filled in while a request is served. kind, side: labels of the count, "" meanwhile. status:
    of an error. tokens: of a whole stream, each but the first in *per_token* seconds."""

    request_id: str
    kind: str = ""
    side: str = SIDE_PROXY
    route: Route = field(default_factory=Route)
    began: float = field(default_factory=time.monotonic)
    first_token_seconds: float | None = None
    status: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    per_token: float = 0.0

    def end_well(self) -> None:
        self.kind = self.kind or "ok"

    def set(self, kind: str, side: str = SIDE_PROXY, status: int = 0) -> None:
        self.kind, self.side, self.status = kind, side, status

    @property
    def has_failed(self) -> bool:
        """True where neither the client nor an end of the proxy that was asked for caused it."""
        return self.kind not in FINE

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def headers(self) -> dict[str, str]:
        route = self.route
        told = {"X-Request-Id": self.request_id, "X-Commext-Path": route.path}
        told |= {"X-Commext-Decode": route.decode}
        if self.kind:
            told[SIDE] = self.side
        has_prefill = route.path in (TWO_STEP, STREAMED)
        if route.placement:
            told["X-Commext-Placement"] = route.placement
        return told | ({"X-Commext-Prefill": route.prefill} if has_prefill else {})


class LocalPrefill(Reason):
    """Reason why a decode engine computes a prompt itself."""

    NO_PARAMETERS = "no_kv_transfer_params", "the prefill engine's answer has no parameters"
    PREFILL_AWAY = "prefill_away", "no prefill engine can be reached"
    PREFILL_FAILED = "prefill_failed", "prefill engines have failed"
    AFTER_FAILURE = "after_failure", "served anew, after a failed prefill or KV load"
    PLACEMENT = "placement", "so it is placed: see commext_proxy_placements"
    NO_READER = "no_reader", "no other engine can be asked than the one that has computed it"
    SHORT_PROMPT = "short_prompt", "the prompt is shorter than --min-prompt-tokens"
    SEVERAL_SAMPLES = "several_samples", "parameters name the blocks of one sequence"
    BEAM_SEARCH = "beam_search", "beam search drops the parameters"
    NOT_ONE_PROMPT = "not_one_prompt", "parameters name the blocks of one sequence"
    PROMPT_LOGPROBS = "prompt_logprobs", "only the engine that computes the prompt knows them"
    TRUNCATION = "truncation", "with another max_tokens it may mean another prompt"
    NO_GENERATION = "no_generation", "no token is asked for"


class AtOnce(Reason):
    """Label of a two-step request: both at once, or the reason against it."""

    STREAMED = "streamed", "both at once"
    OFF = "off", "it is off"
    NOT_KNOWN = "not_known", "the prefill engine has not said yet that it streams, and where"
    DECODE = "decode", "a decode engine does not say that it reads streams"
    SEVERAL = "several", "several side channels answer for the prefill engine"
    ONE_TOKEN = "one_token", "the answer is one token, for which nothing need be read"
    BUSY = "busy", "enough requests wait for the prefill engine already"
    AGAIN = "again", "the request is served anew"
    FAILED = "failed", "the decode engine failed after both at once; one after the other then"
    ALONE = "alone", "the prefill engine was lost or late; the decode engine went on without it"


class Resume(Reason):
    """Label of a stream whose decode engine is lost, gives it up, or drains."""

    RESUMED = "resumed", "it went on at another decode engine"
    OFF = "off", "it is off"
    ENDPOINT = "endpoint", "it is neither a completion nor a chat"
    SAMPLES = "samples", "it holds more than one answer"
    ECHO = "echo", "it begins with the prompt's text"
    NO_ROOM = "no_room", "more than 16 MiB were to be kept of it, or it had the most of 256 MiB"
    NOT_TOLD = "not_told", "its engine does not tell every token's id, or tells what is not known"
    DIFFERS = "differs", "what the other engine answered is not what the client had"
    FAILED = "failed", "no other engine could go on with it"
    ENDING = "ending", "it is about to end where it is"
    ANEW = "anew", "another engine would begin it anew, for longer than it may pause"


_REASONS = {
    "ServerDisconnectedError": "it closed the connection",
    "ClientPayloadError": "its answer was cut off",
    "ConnectionTimeoutError": "no connection in time",
}


def reason_of(error: BaseException) -> str:
    """Cause of a connection's *error*, in words."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return _REASONS.get(type(error).__name__, "it sent what is no HTTP answer")


def lack(error: BaseException | None) -> str:
    """Resource that this host lacks, if that caused *error*; "" if not."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LACKS:
            return error.strerror or errno.errorcode[error.errno]
        error = error.__cause__ or error.__context__
    return ""
