"""How engines fail a request, and what it has lost. Each wait ends, failures become a `ProxyError`,
also those that the beginning of an answer tells, and two lost engines end the request."""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from errno import ECONNREFUSED
from types import TracebackType
from typing import Any, Self

import aiohttp

from vllm_commext.drain import HEADER
from vllm_commext.proxy import errors_phases
from vllm_commext.proxy.engines.engine import BOTH, DECODE, PREFILL, Engine, EnginePool
from vllm_commext.proxy.errors_phases import ENGINES_LOST, EngineAnswer, ProxyError, complaints
from vllm_commext.proxy.http import answer_events
from vllm_commext.proxy.http.answer_events import Cached
from vllm_commext.proxy.policy.engine_load import Answer

MAX_LOST = 2
"""Engines that one request may lose in one step, since it may be what ends them."""
MIN_APART = 8
"""Tokens between two losses that count as different places of the answer."""
MAX_RESUMES = 4
MAX_ANSWER_BYTES = 16 << 20
_CANNOT_CONNECT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_LOST = (aiohttp.ClientError, OSError)
_CORS = ("access-control-", "vary")
_DEAD = (b"EngineDeadError", b"EngineCore encountered an issue")
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
EVENTS = "text/event-stream"
MAX_OPENING_BYTES = 256 << 10
MAX_WHOLE_BYTES = 1 << 20
"""Of an answer in one piece that is read before the client gets any: it can be repeated."""
OnLost = set[Callable[[], None]]


class EngineLostError(Exception):
    """The engine has not been reachable for too long."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class Watch:
    """A block that exceptions of several kinds may end; `asyncio.timeout` has one. *on_lost*: the
    engine's callbacks, which end it with `EngineLostError`."""

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._raised: type[Exception] | Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a running asyncio task, and there is none")
        self._task, self._loop = task, task.get_loop()
        self._num_cancels_before = task.cancelling()
        self._begin()
        self._on_lost.add(self._lose)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_lost.discard(self._lose)
        if self._raised is None or kind is None or not issubclass(kind, asyncio.CancelledError):
            return
        # A cancellation of someone else's that came as well must stay one.
        if self._task.uncancel() > self._num_cancels_before:
            return
        raise self._raised from error

    def _begin(self) -> None:
        raise NotImplementedError

    def _lose(self) -> None:
        self._interrupt(EngineLostError)

    def _interrupt(self, error: type[Exception] | Exception) -> None:
        if self._raised is None:
            self._raised = error
            self._task.cancel()


class Deadline(Watch):
    """Raises `TimeoutError` when time is up, and `EngineLostError` when the engine is lost."""

    def __init__(self, seconds: float, on_lost: OnLost) -> None:
        super().__init__(on_lost)
        self._seconds = seconds

    def _begin(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._interrupt, TimeoutError)

    def hurry(self, seconds: float, reader: "asyncio.Task[Opened]") -> None:
        """Allow *seconds* more at most, as *reader* ends, if it has an answer or a failed load."""
        timer, end = self._timer, self._loop.time() + seconds
        error = None if reader.cancelled() else reader.exception()
        is_told = has_begun(reader) or getattr(error, "kind", "") == "engine_error"
        if is_told and timer and not timer.cancelled() and end < timer.when():
            timer.cancel()
            late = TimeoutError(f"within {seconds} s of the decode engine's answer")
            self._timer = self._loop.call_at(end, self._interrupt, late)


@dataclass
class Losses:
    """Engines that a request has lost, and answers of status 500. place: tokens at the last."""

    engines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    num_answers: int = 0
    place: int = 0

    def break_off(self, place: int) -> None:
        """Forget losses at another place of the answer."""
        if place and abs(place - self.place) >= MIN_APART:
            self.engines.clear()
            self.num_answers = 0
        self.place = place

    def note_answer(self, error: ProxyError) -> None:
        """Note an answer of status 500, the last one that is tried elsewhere but for the first."""
        self.num_answers += 1
        if self.num_answers >= MAX_LOST:
            error.be_final(may_restart=False)

    def note(self, error: ProxyError) -> ProxyError:
        """Note a lost engine; returns the error for the request."""
        self.engines.append((error.side, error.engine or ""))
        if sum(side == error.side for side, _ in self.engines) < MAX_LOST:
            return error
        names = " and ".join(dict.fromkeys(name for _, name in self.engines))
        message = (
            f"{names} lost with this request, {len(self.engines)} times: it may be what ends "
            f"engines, and is tried at no other one. The last time: {error}"
        )
        return ProxyError(502, ENGINES_LOST, message, side=error.side, engine=error.engine)


@dataclass(eq=False)
class Tries:
    """Engines that have failed a request. only: the one that can answer it. num_failed: attempts at
    the answer's present part. num_resumed: times that it was to go on elsewhere. answered_by: the
    engine that had it last. cached_tokens: at the first prefill engine."""

    only: Engine | None = None
    losses: Losses = field(default_factory=Losses)
    prefill: list[Engine] = field(default_factory=list[Engine])
    decode: list[Engine] = field(default_factory=list[Engine])
    num_failed: int = 0
    num_resumed: int = 0
    answered_by: Engine | None = None
    cached_tokens: Cached | None = None

    def go_on_elsewhere(self) -> None:
        self.num_resumed, self.num_failed = self.num_resumed + 1, 0

    def may_begin_again(self, error: ProxyError, most: int) -> bool:
        """Count an attempt that failed; True if another of *most* may follow, from the start."""
        self.num_failed += 1
        return self.num_failed < most and error.can_restart and error.side == DECODE

    def blame(self, error: ProxyError, engines: Iterable[Engine]) -> None:
        self.decode += [one for one in engines if one.name == error.engine]

    @property
    def may_go_on(self) -> bool:
        return self.num_resumed < MAX_RESUMES

    @property
    def is_again(self) -> bool:
        return bool(self.num_failed or self.num_resumed)


@contextmanager
def of(
    engine: Engine,
    timeout_seconds: float,
    losses: Losses | None = None,
    side: str = "",
    may_restart: bool = False,
) -> Iterator[None]:
    """Turn failures of *engine* into `ProxyError`. *losses*: the request's. side: role of the step.
    After a lost connection a prefill may be repeated, but no decode with the same parameters: it
    may have read the blocks, which are free then."""
    try:
        yield
    except (TimeoutError, *_CANNOT_CONNECT, *_LOST, EngineLostError) as error:
        raise meaning_of(engine, error, timeout_seconds, losses, side, may_restart) from error
    except ProxyError as error:
        error.side = side or error.side
        noted = error if losses is None else _noted(error, losses)
        if noted is not error:
            raise noted from error
        raise


def _noted(error: ProxyError, losses: Losses) -> ProxyError:
    if is_dead(error):
        return losses.note(error)
    if error.status == 500:
        losses.note_answer(error)
    return error


def is_dead(error: ProxyError) -> bool:
    told = error.answer.body if error.answer is not None and error.status >= 500 else b""
    return any(one in told for one in _DEAD)


def meaning_of(
    engine: Engine,
    error: BaseException,
    timeout_seconds: float,
    losses: Losses | None = None,
    side: str = "",
    may_restart: bool = False,
) -> ProxyError:
    """Translate *error*; suspect the engine, unless the request has lost others before. After a
    time-out the request goes on elsewhere if it *may restart*."""
    name, side = engine.name, side or side_of(engine)
    if lacked := errors_phases.lack(error):
        message = f"this proxy could not connect to {name}: {lacked}"
        complaints.warning("descriptors", message)
        return ProxyError(503, "overloaded", message)
    if isinstance(error, _CANNOT_CONNECT):
        message = f"could not connect to {name}: {errors_phases.reason_of(error)}"
        if isinstance(error, aiohttp.ClientConnectorError) and error.errno == ECONNREFUSED:
            engine.refuse(f"a request {message}")
        else:
            engine.state.suspect()
        return _failure(
            engine, 502, "unreachable", message, side=side, can_retry=True, can_restart=True
        )
    if isinstance(error, asyncio.TimeoutError):
        message = f"{name} did not answer {str(error) or f'within {timeout_seconds} s'}"
        late = _failure(engine, 504, "timeout", message, side=side, can_restart=may_restart)
        return losses.note(late) if may_restart and losses is not None else late
    if isinstance(error, EngineLostError):
        message = f"{name} can no longer be reached, and its answer was not complete"
    else:
        why = errors_phases.reason_of(error)
        message = f"{name} closed the connection before its answer was complete: {why}"
    more = {"side": side, "can_retry": side == PREFILL, "can_restart": True}
    lost = _failure(engine, 502, "lost", message, **more)
    meant = lost if losses is None else losses.note(lost)
    if meant is lost and not isinstance(error, EngineLostError):
        engine.state.suspect()
    return meant


def _failure(engine: Engine, status: int, kind: str, message: str, **more: Any) -> ProxyError:
    more.setdefault("side", side_of(engine))
    return ProxyError(status, kind, message, engine=engine.name, **more)


def side_of(engine: Engine) -> str:
    return DECODE if engine.role == BOTH else engine.role


async def read_answer(engine: Engine, response: aiohttp.ClientResponse) -> EngineAnswer:
    body = bytearray()
    while piece := await response.content.readany():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise bad_answer(engine, f"more than {MAX_ANSWER_BYTES} bytes")
    headers = {"Content-Type": response.headers.get("Content-Type", "application/json")}
    headers |= {k: v for k, v in response.headers.items() if k.lower().startswith(_CORS)}
    return EngineAnswer(bytes(body), headers)


async def prefilled_params(
    engine: Engine, status: int, answer: EngineAnswer
) -> tuple[dict[str, Any] | None, Cached | None]:
    """Parameters in a prefill's *answer*, long ones as text, and its usage's cached tokens."""
    if status >= 400:
        raise engine_error(engine, status, answer, can_retry=status >= 500)
    try:
        content = await answer_events.decoded(answer.body)
    except (ValueError, RecursionError) as error:
        raise bad_answer(engine, f"{len(answer.body)} bytes that are no JSON ({error})") from error
    if status != 200 or not isinstance(content, dict):
        raise bad_answer(engine, f"status {status}, JSON of type {type(content).__name__}")
    params = content.get("kv_transfer_params")
    if not (params is None or isinstance(params, dict)):
        raise bad_answer(engine, f"kv_transfer_params {type(params).__name__}")
    if not params and answer_events.is_aborted(answer.body):
        raise aborted(engine, can_retry=True)
    cached = (params or {}).get("remote_prefill_cached_tokens")
    return params or None, Cached(cached, _created(content)) if isinstance(cached, int) else None


def _created(content: dict[str, Any]) -> int | None:
    usage = content.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    created = details.get("created_cache_tokens") if isinstance(details, dict) else None
    return created if isinstance(created, int) else None


def close(response: aiohttp.ClientResponse) -> None:
    """Abort what has not come yet; costs nothing after an answer's end."""
    if not response.closed:
        response.close()


def check_not_draining(engine: Engine, response: aiohttp.ClientResponse) -> None:
    """Raise `ProxyError` if the engine refused because it drains: it has begun nothing."""
    if HEADER not in response.headers:
        return
    engine.note_drain()
    response.close()
    message = f"{engine.name} drains and takes no new work"
    raise _failure(engine, 503, "draining", message, can_retry=True, can_restart=True)


def engine_error(
    engine: Engine, status: int, answer: EngineAnswer, can_retry: bool = False
) -> ProxyError:
    kind = "engine_error" if status >= 500 else "refused"
    more = {"can_retry": can_retry, "can_restart": status >= 500, "answer": answer}
    return _failure(engine, status, kind, f"{engine.name} answered {status}", **more)


def aborted(engine: Engine, can_retry: bool = False) -> ProxyError:
    """An engine that ends gives up requests with status 200; /health tells whether it does."""
    engine.state.suspect()
    message = f"{engine.name} gave the request up"
    return _failure(engine, 502, "aborted", message, can_retry=can_retry, can_restart=True)


def told(engine: Engine, event: bytes, losses: Losses) -> ProxyError:
    """Error of an *event* in the midst of a stream; b"" if another engine answers otherwise."""
    if (error := answer_events.opening_error(event)) is not None:
        answer = EngineAnswer(error[1])
        return _noted(engine_error(engine, error[0], answer), losses)
    if event:
        return aborted(engine)
    return bad_answer(engine, "another answer than that which it was to go on with")


def bad_answer(engine: Engine, got: str) -> ProxyError:
    message = f"{engine.name}: expected a completion as a vLLM server sends it, got {got}"
    return _failure(engine, 502, "bad_answer", message, can_restart=True)


def no_engine(pool: EnginePool) -> ProxyError:
    message = f"no usable {pool.role} engine among {len(pool.engines)}; the proxy's log says why"
    return ProxyError(503, "no_engine", message, side=pool.role)


@dataclass
class Opened:
    """An answer that has begun. first: what may be sent already, the first token included. cutter:
    of a stream. has_end: it ends with [DONE]. work: ends with the answer. cached_tokens: at the
    prefill engine, if the decode engine could not know."""

    engine: Engine
    response: aiohttp.ClientResponse
    first: bytes
    cutter: answer_events.EventCutter | None
    has_end: bool
    opened_at: float
    work: ExitStack
    answer: Answer | None = None
    cached_tokens: Cached | None = None

    def take(self) -> bytes:
        first, self.first = self.first, b""
        return first

    def keep(self, events: bytes) -> None:
        self.first += events

    def note(self, piece: bytes, now: float) -> None:
        """Count the tokens of a piece of the stream."""
        if self.answer is not None and (tokens := answer_events.num_tokens(piece)):
            self.answer.go_on(tokens, now)

    @property
    def answer_id(self) -> str:
        """The answer's id, or its first event's; "" without one."""
        found = _ID.search(self.first, 0, 4096)
        return found[1].decode(errors="replace") if found else ""

    def close(self) -> None:
        """Let go of the engine, which aborts the rest."""
        self.work.close()


def has_begun(asked: asyncio.Task[Opened]) -> bool:
    """True if a decode engine answers: it has the prompt."""
    is_open = asked.done() and not asked.cancelled() and asked.exception() is None
    return is_open and asked.result().response.status < 400


async def read_opening(
    engine: Engine,
    response: aiohttp.ClientResponse,
    whole: tuple[str, bool],
    streams: bool | None,
    edit: Callable[[bytes], bytes | None] | None,
) -> tuple[bytes, answer_events.EventCutter | None]:
    """First piece of *response*, and the cutter of a stream. Raises `ProxyError`.

    *whole*: a member of a whole answer, and whether it need not be JSON. *streams*: a completion is
    to be a stream; None if either form is right. *edit*: removes what the client has not asked for.
    vLLM answers a stream with 200 before it computes: a failure is its first event, follows a
    chat's role, or is an early end.
    """
    if response.status >= 500:
        raise engine_error(engine, response.status, await read_answer(engine, response))
    is_stream = response.content_type == EVENTS
    if response.status < 400 and streams is not None:
        expected = EVENTS if streams else "application/json"
        if response.content_type != expected:
            raise bad_answer(engine, f"{response.content_type} in place of {expected}")
    if is_stream:
        cutter = answer_events.EventCutter()
        return await _opening(engine, response, cutter, edit), cutter
    first, is_whole = await _beginning(response)
    if answer_events.is_aborted(first):
        raise aborted(engine)
    if response.status < 400:
        _check_whole(engine, response, *whole, first if is_whole else b"")
        if not first:
            raise bad_answer(engine, "no byte")
    return first, None


def _check_whole(
    engine: Engine, response: aiohttp.ClientResponse, member: str, is_free_form: bool, whole: bytes
) -> None:
    is_json = response.content_type == "application/json"
    if not is_json and not is_free_form:
        raise bad_answer(engine, f"{response.content_type} in place of application/json")
    if is_json and whole and (missing := answer_events.lack_of(member, whole)):
        raise bad_answer(engine, missing)


async def _beginning(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """Up to `MAX_WHOLE_BYTES` of an answer, and whether that is all."""
    body = bytearray()
    while len(body) <= MAX_WHOLE_BYTES:
        piece = await response.content.readany()
        if not piece:
            return bytes(body), True
        body += piece
    return bytes(body), False


async def _opening(
    engine: Engine,
    response: aiohttp.ClientResponse,
    cutter: answer_events.EventCutter,
    edit: Callable[[bytes], bytes | None] | None,
) -> bytes:
    events, has_ended = b"", False
    while not has_ended and (not events or answer_events.says_nothing(events)):
        if len(events) > MAX_OPENING_BYTES:
            break
        if events:  # others go on in between
            await asyncio.sleep(0)
        piece = await response.content.readany()
        ready = cutter.feed(piece)
        if (edited := ready if edit is None else edit(ready)) is None:
            raise bad_answer(engine, "one of another LoRA adapter, or of other weights")
        events += edited
        has_ended = not piece
    if answer_events.opens_aborted(events):
        raise aborted(engine)
    if (failed := answer_events.opening_error(events)) is not None and failed[0] >= 500:
        raise engine_error(engine, failed[0], EngineAnswer(failed[1]))
    if has_ended:
        raise bad_answer(engine, "a stream that ends before its first token; its log may say why")
    return events
