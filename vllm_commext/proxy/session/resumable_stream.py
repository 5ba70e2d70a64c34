"""Keeps a stream's token ids and text, so that it can go on at another decode engine. Pure.

An engine goes on after the ids it is given, or begins again. Then `Replay` compares what comes with
what the client has.
"""

import re
from array import array
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import msgspec

from vllm_commext.proxy.errors_phases import LocalPrefill, Resume
from vllm_commext.proxy.http.json_members import decode, dumps
from vllm_commext.proxy.session.resume_comparison import UNKNOWN, DiffersError, Replay, edited
from vllm_commext.proxy.session.resume_memory import Room

ANSWER, PIECES, TELLS = "answer_token_ids", "answer_pieces", "tells_computed_by"
_GROWTH_BYTES = 16 << 10
_TRIAL_BYTES = 1 << 30
_DATA, _DONE = b"data: ", b"data: [DONE]"
_END = b"\n\n"
_IDS = b'"token_ids":['
MAX_EVENT_BYTES, MAX_PROMPT_BYTES = 64 << 10, 1 << 20
"""Of an event, without and with the prompt's ids; a stream with a larger one is not resumed."""
_PROMPT = b'"prompt_token_ids":['
_PROMPT_IDS = re.compile(rb'("prompt_token_ids":)\[[\d,]*\]')
_FIRST_ID = re.compile(rb'(?<="prompt_token_ids":\[)\d{1,40}')
_MARK_BITS = 32
"""A prompt's first id has above these what computes the answer, where that is asked."""
_GIVEN_UP = ("abort", "error")
_SEVERAL = (LocalPrefill.SEVERAL_SAMPLES, LocalPrefill.BEAM_SEARCH, LocalPrefill.NOT_ONE_PROMPT)
_PLAIN = {
    "text": (b'"choices":[{"index":0,"text":"', b'","logprobs":null,"finish_reason":null,'),
    "content": (
        b'"choices":[{"index":0,"delta":{"content":"',
        b'"},"logprobs":null,"finish_reason":null,',
    ),
}
"""vLLM's text around that of an event in mid-answer; quotes in a text are escaped."""
_MAX_RAW_BYTES = 4 << 10
_NOTE = b',"commext_resumed":%d}'
"""In an answer's last event: how often it has gone on elsewhere."""


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    id: str = ""
    created: int = 0
    choices: list[_Choice] | None = None
    error: Any = None


class _Passed(msgspec.Struct):
    """Events that were passed on unread; pieces: the tokens of each."""

    text: str
    pieces: list[list[int]]


_DECODER = msgspec.json.Decoder(_Event)
_PASSED = msgspec.json.Decoder(_Passed)


class _Told:
    """The text and tokens that a client has. pieces: tokens of each event. end: the reason for the
    end. num_bytes: size of all that is kept."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.has_usage = num_bytes, False
        self.end: str | None = None
        self.clear()

    def clear(self) -> None:
        self.ids, self.pieces = array("i"), array("i")
        self.texts: dict[str, bytearray] = {}

    def take(self, choice: _Choice, pieces: Iterable[int]) -> bool:
        """Keep a part of an answer that came in *pieces*; False if it is unknown, or has no ids."""
        ids, delta = choice.token_ids, choice.delta
        try:
            if ids is None:
                return delta is not None and "role" in delta and not edited(delta)
            if delta is None:
                self._take_text("text", choice.text)
            else:
                edited(delta, self._take_text)
                self.pieces.extend(filter(None, pieces))
            self.ids.extend(ids)
        except UNKNOWN:
            return False
        self.end = choice.finish_reason or self.end
        self.num_bytes += 8 * len(ids)
        return True

    def _take_text(self, name: str, text: str) -> str:
        raw = text.encode()
        try:
            self.texts[name] += raw
        except KeyError:
            self.texts[name] = bytearray(raw)
        self.num_bytes += len(raw)
        return text

    def other_pieces(self) -> list[int]:
        """Numbers of tokens that go through the next engine's parsers at a time, empty for one by
        one: as in the client's events, as vLLM's parsers may answer otherwise to others."""
        if not self.pieces:
            return [len(self.ids)]  # of a completion, which has no parser
        return self.pieces.tolist() if max(self.pieces) > 1 else []


class _Unread:
    """Ordinary events that were passed on unread, which is cheap. field: of their text; "" where
    the next event is read."""

    def __init__(self) -> None:
        self.field = ""
        self.ids, self.text = bytearray(), bytearray()

    def pass_on(self, event: bytes, hides_ids: bool) -> bytes | None:
        """Note an ordinary event and return it for the client; None for another one."""
        opening, closing = _PLAIN[self.field]
        begin = event.find(opening)
        end = event.find(closing, begin)
        first = event.find(_IDS, end) + len(_IDS)
        last = event.find(b"]", first)
        if not len(_IDS) <= first < last or begin < 0 or end < 0:
            return None
        text = event[begin + len(opening) : end]
        if b'":' in text:  # perhaps another field
            return None
        self.text += text
        self.ids += event[first - 1 : last]
        self.ids += b"],"
        return event[: first - 1] + b"null" + event[last + 1 :] if hides_ids else event

    def read(self) -> tuple[_Choice, list[int]]:
        """Return the text of these events, and how many tokens each has. Raises `ValueError`."""
        text = b'{"text":"%b","pieces":[%b]}' % (self.text, self.ids[:-1])
        passed = _PASSED.decode(text)
        choice = _Choice(token_ids=[token for piece in passed.pieces for token in piece])
        if self.field == "text":
            choice.text = passed.text
        else:
            choice.delta = {self.field: passed.text}
        return choice, [*map(len, passed.pieces)]

    def clear(self) -> None:
        self.ids.clear()
        self.text.clear()


class _Origin:
    """The first engine's event, whose id and time all have. num_resumed: times that the stream has
    gone on at another engine."""

    def __init__(self, first: _Event | None = None) -> None:
        self.first, self.num_resumed = first, 0
        self.renames: tuple[tuple[bytes, bytes], ...] | None = ()

    def go_on(self) -> None:
        self.num_resumed, self.renames = self.num_resumed + 1, None

    def renamed(self, event: bytes, told: _Event) -> bytes:
        if self.renames is None:
            first = self.first or told
            names = (b'"id":%s', dumps(told.id), dumps(first.id))
            times = (b'"created":%s', dumps(told.created), dumps(first.created))
            every = [(form % new, form % old) for form, new, old in (names, times)]
            self.renames = tuple(one for one in every if one[0] != one[1])
        for new, old in self.renames:
            event = event.replace(new, old, 1)
        return event

    def ended(self, event: bytes) -> bytes:
        """The last event, with `_NOTE`."""
        is_object = self.num_resumed and event.endswith(b"}" + _END)
        return event[:-3] + _NOTE % self.num_resumed + _END if is_object else event


def refusal(is_split: bool, body: Mapping[str, Any], local: LocalPrefill | None) -> Resume | None:
    """Reason why a stream is never resumed, or None. *local*: the reason against two steps."""
    if not is_split or body.get("stream") is not True:
        return Resume.ENDPOINT
    if local in _SEVERAL:
        return Resume.SAMPLES
    if body.get("echo"):
        return Resume.ECHO
    is_known = body.get("return_token_ids") in (None, False, True)
    return None if is_known and not body.get("return_weight_versions") else Resume.NOT_TOLD


class Transcript:
    """Tokens and text that a client has. refusal: why its stream is not resumed. hides_ids: it has
    not asked for ids. held: the event by which its engine gave up, b"" where that answers
    otherwise, None while it has not failed."""

    def __init__(self, room: Room, body: Mapping[str, Any], num_bytes: int) -> None:
        self._room, self.hides_ids = room, not body.get("return_token_ids")
        self._told, self._unread, self._origin = _Told(num_bytes), _Unread(), _Origin()
        self._replay: Replay | None = None
        self._computed_by = 0
        self.held: bytes | None = None
        self.refusal: Resume | None = None
        self.body: Mapping[str, Any] = {}
        self._take_room()

    def keep(self, body: Mapping[str, Any], num_bytes: int) -> None:
        """Keep the request, too, which is sent again if the stream goes on elsewhere."""
        self._told.num_bytes += num_bytes
        if self.refusal is None:
            self.body = body
            self._take_room()

    def give_up(self) -> None:
        """Make room for others."""
        self._leave(Resume.NO_ROOM, b"")

    def asking(self, body: Mapping[str, Any], asks_mark: bool = False) -> dict[str, Any]:
        """Body for a decode engine, which tells token ids and goes on after those kept."""
        self.settle()
        params = {**(body.get("kv_transfer_params") or {})}
        if asks_mark:
            params[TELLS] = True
        if self._told.ids:
            params[ANSWER] = self._told.ids.tolist()
            if pieces := self._told.other_pieces():
                params[PIECES] = pieces
        asked = {**body, "return_token_ids": True}
        return {**asked, "kv_transfer_params": params} if params else asked

    def edit(self, events: bytes) -> bytes | None:
        """An answer's beginning without what the client has not asked for; None where it comes of
        another adapter or other weights than what the client has."""
        if (found := _FIRST_ID.search(events)) is None:
            return events
        mark, first = divmod(int(found[0]), 1 << _MARK_BITS)
        if self._told.ids and mark and self._computed_by not in (0, mark):  # 0: it does not tell
            return None
        self._computed_by = mark
        if self.hides_ids:
            return _PROMPT_IDS.sub(rb"\1null", events)
        return _FIRST_ID.sub(b"%d" % first, events)

    def begin_again(self) -> None:
        self.settle()
        self.held, self._replay = None, Replay(self._told.ids, self._told.texts)
        self._origin.go_on()
        self._unread.field = ""

    @property
    def has_failed(self) -> bool:
        return self.held is not None

    @property
    def has_finished(self) -> bool:
        return self._told.end is not None

    @property
    def num_tokens(self) -> int:
        return len(self._told.ids)

    @property
    def place(self) -> int:
        return self.num_tokens - (self._replay.num_left if self._replay is not None else 0)

    @property
    def is_behind(self) -> bool:
        """True while it is being repeated, and cannot be given up."""
        return self._replay is not None

    def trial(self) -> "Transcript":
        """A copy to try another engine's events on."""
        copy = Transcript(Room(_TRIAL_BYTES), {"return_token_ids": not self.hides_ids}, 0)
        copy._told, copy._origin = deepcopy(self._told), _Origin(self._origin.first)
        copy.begin_again()
        return copy

    def settle(self) -> Resume | None:
        """Take in what was passed unread; why the stream is not resumed, or None."""
        if self._unread.ids and self.refusal is None:
            try:
                is_noted = self._has_noted(*self._unread.read())
            except ValueError:
                is_noted = False
            if not is_noted:
                self._leave(Resume.NOT_TOLD, b"")
        self._unread.clear()
        return self.refusal

    def close(self) -> None:
        self._room.give_back(self)
        self.body = {}
        self._told.clear()
        self._replay, self._unread.field = None, ""

    def pass_on(self, events: bytes) -> bytes:
        if self.refusal is not None and self.held is None and _IDS not in events:
            return events
        if events.find(_END) == len(events) - len(_END):
            return self._pass_on(events)
        return b"".join(self._pass_on(event + _END) for event in events.split(_END) if event)

    def _pass_on(self, event: bytes) -> bytes:
        if self.held is not None:
            return b""
        if len(event) > MAX_EVENT_BYTES and self.refusal is None and _is_large(event):
            return self._shown(event) if self.settle() else self._leave(Resume.NOT_TOLD, event)
        unread = self._unread
        if unread.field and (passed := unread.pass_on(event, self.hides_ids)) is not None:
            if len(unread.ids) + len(unread.text) > _MAX_RAW_BYTES:
                self.settle()
            return passed
        if self.settle() is None:
            return self._take(event)
        return self._shown(event)

    def _take(self, event: bytes) -> bytes:
        if event.startswith(b":") or (event.startswith(_DONE) and self._replay is None):
            return event
        try:
            told = _DECODER.decode(event[len(_DATA) :])
        except ValueError:
            return self._leave(Resume.NOT_TOLD, event)
        choice = told.choices[0] if told.choices else None
        if _is_given_up(told.error, choice):
            self.held = self._shown(event)
            return b""
        if told.choices is None:
            return self._leave(Resume.NOT_TOLD, event)
        if self._origin.renames != ():
            event = self._origin.renamed(event, told)
        if self._replay is not None:
            return self._spliced(event, choice, self._replay)
        if choice is None:  # its usage, which the client may have of another engine
            had_usage, self._told.has_usage = self._told.has_usage, True
            return b"" if had_usage and self._origin.num_resumed else event
        if self._origin.first is None:
            self._origin.first = told
        pieces = (len(choice.token_ids or ()),)
        if len(told.choices) > 1 or not self._has_noted(choice, pieces):
            return self._leave(Resume.NOT_TOLD, event)
        self._unread.field = ""
        if choice.finish_reason is not None:
            event = self._origin.ended(event)
        elif self._origin.renames == () and self.refusal is None:
            self._unread.field = "content" if choice.delta is not None else "text"
        if not self.hides_ids:
            return event
        # A token without text has an event only where ids are asked for.
        is_empty = choice.delta == {} and choice.finish_reason is None and not choice.logprobs
        return b"" if is_empty else self._shown(event)

    def _shown(self, event: bytes) -> bytes:
        return _without_ids(event) if self.hides_ids else event

    def _has_noted(self, choice: _Choice, pieces: Iterable[int] = ()) -> bool:
        is_known = self._told.take(choice, pieces)
        if is_known and self._told.num_bytes > self._room.taken(self):
            self._take_room()
        return is_known

    def _spliced(self, event: bytes, choice: _Choice | None, replay: Replay) -> bytes:
        had_finished = self.has_finished
        if choice is None:
            return self._fail()
        if choice.token_ids is None:
            return b"" if self._has_noted(choice) else self._fail()
        try:
            num_tokens = len(choice.token_ids)
            choice.token_ids = replay.new_ids(choice.token_ids)
            choice.logprobs = _last(choice.logprobs, num_tokens - len(choice.token_ids))
            choice.text = replay.new_text("text", choice.text)
            if choice.delta is not None:
                choice.delta = edited(choice.delta, replay.new_text)
            has_text = bool(choice.text or choice.delta)
            replay.end_event(has_new_ids=bool(choice.token_ids), has_new_text=has_text)
        except (DiffersError, *UNKNOWN):
            return self._fail()
        if self._ends_otherwise(choice, replay) or not self._has_noted(choice):
            return self._fail()
        if not replay.num_left:
            self._replay = None
            if choice.delta is not None:
                self._told.pieces = replay.pieces
        ends = choice.finish_reason is not None
        is_told = choice.token_ids and (choice.logprobs or not self.hides_ids)
        is_new = ends or has_text or is_told
        if self.has_failed or had_finished or not is_new:
            return b""
        event = self._rewritten(event, choice)
        return self._origin.ended(event) if ends else event

    def _ends_otherwise(self, choice: _Choice, replay: Replay) -> bool:
        """True where the other engine ends before the client's last token, or not with it."""
        if replay.num_left:
            return choice.finish_reason is not None
        is_same = choice.finish_reason == self._told.end and not choice.token_ids
        return self.has_finished and not is_same

    def _rewritten(self, event: bytes, choice: _Choice) -> bytes:
        content = decode(event[len(_DATA) :])
        (told,) = content["choices"]
        told["token_ids"] = None if self.hides_ids else choice.token_ids
        told["logprobs"] = choice.logprobs
        if choice.delta is None:
            told["text"], told["prompt_token_ids"] = choice.text, None
        else:
            told["delta"] = choice.delta
        return _DATA + dumps(content) + _END

    def _take_room(self) -> None:
        missing = max(self._told.num_bytes - self._room.taken(self), _GROWTH_BYTES)
        if not self._room.take(self, missing):
            self._leave(Resume.NO_ROOM, b"")

    def _leave(self, reason: Resume, event: bytes) -> bytes:
        if self._replay is not None:
            return self._fail()
        self.refusal = reason
        self.close()
        return self._shown(event)

    def _fail(self) -> bytes:
        self.held, self.refusal = b"", Resume.DIFFERS
        self.close()
        return b""


def _is_large(event: bytes) -> bool:
    """True for an event that would take long to read; a prompt's ids are skipped."""
    begin = event.find(_PROMPT)
    end = event.find(b"]", begin) if begin >= 0 else begin
    return len(event) - (end - begin) > MAX_EVENT_BYTES or len(event) > MAX_PROMPT_BYTES


def _is_given_up(error: Any, choice: _Choice | None) -> bool:
    if error is None:
        return choice is not None and choice.finish_reason in _GIVEN_UP
    code = error.get("code") if isinstance(error, dict) else None
    return not isinstance(code, int) or code >= 500


def _last(logprobs: dict[str, Any] | None, num_told: int) -> dict[str, Any] | None:
    if not logprobs:
        return logprobs
    every = logprobs.items()
    return {name: value[num_told:] if isinstance(value, list) else value for name, value in every}


def _without_ids(event: bytes) -> bytes:
    begin = event.find(_IDS)
    if begin < 0:
        return event
    end = event.index(b"]", begin)
    return event[: begin + len(_IDS) - 1] + b"null" + event[end + 1 :]
