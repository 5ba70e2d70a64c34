"""An engine's steps as columns: what a step's messages hold that pickle is slow with.

A request's name goes over once and is a number from then on; lists of names and of integers become
columns of int32; a dict that is keyed by the step's names becomes its values. Only what is exactly
of the expected type is taken (`csrc/shm/columns.h`); every other field, and every field that is not
named here, is pickled as it is. So nothing is guessed, and what arrives equals what pickle makes.

Both ends count the steps. A writer that could not send one begins a new epoch, as it does after
`EPOCH_STEPS`: with no names known. A reader that missed one says so until the next epoch.
"""

import dataclasses
import marshal
import struct
import zlib
from collections.abc import Callable
from typing import Any

from ..errors import ProtocolError
from . import _shm_ring as native

MARK = b"s"
HEADER = struct.Struct("<cII")  # the mark, the layout's fingerprint, bytes of columns
MARSHAL_VERSION = 4
EPOCH_STEPS = 4096
MOST_NAMES = 16384  # of an epoch; most of them belong to requests that have long been answered

Columns = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StepClasses:
    """vLLM's classes: what the engine sends to workers, what of it is about running requests, and
    what a worker answers, with the status beside it."""

    scheduled: type
    cached: type
    output: type
    status: type

    COLUMNS = (
        ("scheduled", ("scheduled_cached_reqs", "num_scheduled_tokens")),
        ("cached", ("req_ids", "num_computed_tokens", "num_output_tokens")),
        ("output", ("req_ids", "req_id_to_index", "sampled_token_ids")),
    )

    def problem(self) -> str:
        """Why they cannot be sent as columns; empty if they can."""
        for role, names in self.COLUMNS:
            kind: type = getattr(self, role)
            fields = getattr(kind, "__dataclass_fields__", None)
            if fields is None:
                return f"{kind.__qualname__} is no dataclass"
            own = set().union(*(vars(base) for base in kind.__mro__[:-1]))
            special = own & {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
            if special or "__slots__" in own:
                return f"{kind.__qualname__} is pickled in a way of its own"
            missing = set(names) - set(fields)
            if missing:
                return f"{kind.__qualname__} has no {', '.join(sorted(missing))}"
        return ""

    def fields(self, role: str) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(getattr(self, role)))

    def fingerprint(self) -> int:
        """Of all that both ends must agree on."""
        roles = [(role, self.fields(role)) for role, _ in self.COLUMNS]
        statuses = [str(status) for status in self.status]  # pyright: ignore
        return zlib.crc32(repr((native.VERSION, roles, statuses)).encode())


class StepEncoder:
    """A writer's side."""

    def __init__(self, classes: StepClasses) -> None:
        self._classes = classes
        self._fingerprint = classes.fingerprint()
        self._statuses = list(classes.status)  # pyright: ignore
        layouts = {role: classes.fields(role) for role, _ in classes.COLUMNS}
        self._scheduled, self._cached, self._output = (layouts[role] for role in layouts)
        at = self._scheduled.index
        self._cached_at, self._tokens_at = at("scheduled_cached_reqs"), at("num_scheduled_tokens")
        at = self._cached.index
        self._ids_at, self._computed_at = at("req_ids"), at("num_computed_tokens")
        self._count_at = at("num_output_tokens")
        at = self._output.index
        self._out_ids_at, self._index_at = at("req_ids"), at("req_id_to_index")
        self._sampled_at = at("sampled_token_ids")
        self._epoch = 0
        self.forget()

    def forget(self) -> None:
        """The last step was not sent: begin a new epoch."""
        self._epoch += 1
        self._step = 0
        self._numbers: dict[str, int] = {}
        self._last: list[str] = []

    def pack(self, message: tuple[Any, ...]) -> tuple[bytes, Any] | None:
        """What goes in front, and what is to be pickled after it; None if it is no step."""
        count = len(message)
        if count == 4:
            args = message[1]
            if type(args) is tuple and args and type(args[0]) is self._classes.scheduled:
                return self._pack_call(message, args)
        elif count == 2 and type(message[1]) is self._classes.output:
            return self._pack_answer(message[0], message[1])
        return None

    def _pack_call(self, message: tuple[Any, ...], args: Any) -> tuple[bytes, Any] | None:
        state = args[0].__dict__
        if tuple(state) != self._scheduled:
            return None
        values = list(state.values())
        cached = values[self._cached_at]
        if type(cached) is not self._classes.cached or tuple(cached.__dict__) != self._cached:
            return None
        running = list(cached.__dict__.values())
        names = running[self._ids_at]
        if (column := self._names(names)) is None:
            return None
        where, fresh = column
        n = len(names)
        computed = native.pack_ints(running[self._computed_at], n)
        counts = native.pack_ints(running[self._count_at], n)
        tokens = values[self._tokens_at]
        keys: Any = None
        lengths = None
        if type(tokens) is dict and tokens:
            lengths = native.pack_ints(list(tokens.values()), len(tokens))
            if lengths is not None:
                ordered = list(tokens)
                if not native.same_names(ordered, self._last):
                    keys = native.pack_names(ordered, self._numbers, fresh)
                    lengths = None if keys is None else lengths
        values[self._cached_at] = running[self._ids_at] = None
        if computed is not None:
            running[self._computed_at] = None
        if counts is not None:
            running[self._count_at] = None
        if lengths is not None:
            values[self._tokens_at] = None
        columns = 0, self._epoch, self._step, fresh, where, computed, counts, keys, lengths
        rest = message[0], args[1:], message[2], message[3], values, running
        return self._finish(columns), rest

    def _pack_answer(self, status: Any, output: Any) -> tuple[bytes, Any] | None:
        state = output.__dict__
        if tuple(state) != self._output:
            return None
        values = list(state.values())
        names = values[self._out_ids_at]
        if (column := self._names(names)) is None:
            return None
        where, fresh = column
        is_index = native.is_index(values[self._index_at], names)
        sampled = native.pack_singles(values[self._sampled_at], len(names))
        values[self._out_ids_at] = None
        if is_index:
            values[self._index_at] = None
        if sampled is not None:
            values[self._sampled_at] = None
        place = None
        if type(status) is self._classes.status:
            place, status = self._statuses.index(status), None
        columns = 1, self._epoch, self._step, fresh, where, place, is_index, sampled
        return self._finish(columns), (status, values)

    def _names(self, names: Any) -> tuple[bytes | None, list[str]] | None:
        """The column of the step's names, None if they are those of the last step, and the names
        that are new to the reader; nothing if they are no list of strings."""
        if self._step >= EPOCH_STEPS or len(self._numbers) >= MOST_NAMES:
            self.forget()
        fresh: list[str] = []
        if self._step and native.same_names(names, self._last):
            return None, fresh
        where = native.pack_names(names, self._numbers, fresh)
        if where is None:
            return None
        self._last = list(names)
        return where, fresh

    def _finish(self, columns: Columns) -> bytes:
        self._step += 1
        packed = marshal.dumps(columns, MARSHAL_VERSION)
        return HEADER.pack(MARK, self._fingerprint, len(packed)) + packed


class StepDecoder:
    """A reader's side."""

    def __init__(self, classes: StepClasses) -> None:
        self._classes = classes
        self._fingerprint = classes.fingerprint()
        self._statuses = list(classes.status)  # pyright: ignore
        self._scheduled, self._cached, self._output = (
            classes.fields(role) for role, _ in classes.COLUMNS
        )
        self._epoch = self._step = -1
        self._names: list[str] = []
        self._last: list[str] = []

    def unpack(self, head: bytes, loads: Callable[[Any], Any]) -> Any:
        """The message. `loads`: unpickles what comes after the columns.

        Raises ProtocolError for another vLLM's steps, and for one that says "as the last one" where
        that is missing here.
        """
        _, fingerprint, num_bytes = HEADER.unpack_from(head)
        if fingerprint != self._fingerprint:
            raise ProtocolError(
                "the writer's vLLM has other fields in its steps than this process's: install the "
                "same vLLM and the same vllm-commext on every host"
            )
        begin = HEADER.size + num_bytes
        columns = marshal.loads(head[HEADER.size : begin])
        self._follow(*columns[1:5])
        rest = loads(memoryview(head)[begin:])
        return (self._answer if columns[0] else self._call)(columns, rest)

    def _follow(self, epoch: int, step: int, fresh: list[str], where: bytes | None) -> None:
        if step == 0:
            self._names, self._last = [], []
        elif (epoch, step) != (self._epoch, self._step + 1):
            raise ProtocolError(
                f"expected step {self._step + 1} of epoch {self._epoch}, got {step} of {epoch}: "
                "this reader has lost one to an error; it goes on with the writer's next epoch"
            )
        self._epoch = -1  # until all of it has been followed
        self._names += fresh
        if where is not None:
            self._last = native.unpack_names(where, self._names)
        self._epoch, self._step = epoch, step

    def _call(self, columns: Columns, rest: Any) -> Any:
        _, _, _, _, _, computed, counts, keys, lengths = columns
        method, others, kwargs, rank, values, running = rest
        names = self._last
        cached = self._made(self._classes.cached, self._cached, running)
        state = cached.__dict__
        state["req_ids"] = list(names)
        if computed is not None:
            state["num_computed_tokens"] = _ints(computed, len(names))
        if counts is not None:
            state["num_output_tokens"] = _ints(counts, len(names))
        scheduled = self._made(self._classes.scheduled, self._scheduled, values)
        state = scheduled.__dict__
        state["scheduled_cached_reqs"] = cached
        if lengths is not None:
            if keys is not None:
                names = native.unpack_names(keys, self._names)
            state["num_scheduled_tokens"] = (
                dict.fromkeys(names, lengths)
                if type(lengths) is int
                else dict(zip(names, native.unpack_ints(lengths), strict=True))
            )
        return method, (scheduled, *others), kwargs, rank

    def _answer(self, columns: Columns, rest: Any) -> Any:
        _, _, _, _, _, place, is_index, sampled = columns
        status, values = rest
        names = self._last
        output = self._made(self._classes.output, self._output, values)
        state = output.__dict__
        state["req_ids"] = list(names)
        if is_index:
            state["req_id_to_index"] = dict(zip(names, range(len(names)), strict=True))
        if sampled is not None:
            state["sampled_token_ids"] = native.unpack_singles(sampled)
        return (status if place is None else self._statuses[place]), output

    @staticmethod
    def _made(kind: Any, layout: tuple[str, ...], values: list[Any]) -> Any:
        made = kind.__new__(kind)
        made.__dict__.update(zip(layout, values, strict=True))
        return made


def _ints(column: int | bytes, count: int) -> list[int]:
    return [column] * count if isinstance(column, int) else native.unpack_ints(column)
