"""Python objects to the parts of a record and back: pickle protocol 5, large contents out of band.

A part is written to the ring straight from the object's memory, and received straight into the
memory that the new object owns. This goes for what takes part in pickle's buffer protocol (numpy
arrays) and for CPU tensors of torch. An engine's steps are not pickled (`StepClasses`)."""

import copyreg
import dataclasses
import functools
import pickle
import sys
import zlib
from types import SimpleNamespace
from typing import Any

from ..errors import ProtocolError
from . import _shm_ring
from ._shm_ring import STEP_FORMAT, STEP_NO_SLOT, VERSION, Packer, Unpacker
from .reducers import PROTOCOL, reduce_array, reduce_tensor, refuse_storage

ALL_TYPES = 3  # that have reducers of ours: numpy's one and torch's two
IN_BAND_BYTES = 16 << 10  # inside a pickle; below, a part of its own costs more than its copies
MEMO_BYTES = 16 << 10  # of a pickler that is kept: to clear its memo takes time for all that the
# largest message ever put there, and longer than a new pickler beyond this
MAX_BUFFERS = 64  # of one message; more go in band. Fewer than any ring's parts.

MARK = b"s"
STEP = MARK[0]  # the first byte of a record that is no pickle
SHORT_BYTES = 512  # of a pickle whose memo is below MEMO_BYTES: an entry takes two bytes or more

Record = bytes | tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StepClasses:
    """vLLM's classes of an engine's steps, which go field by field (`csrc/shm/step_format.h`).

    Integers go as int32, a request's name once and as a number from then on. Only the exact types
    are taken; all else is pickled. A list or dict that a message holds twice arrives as two.

    Both ends count the steps that have names. A writer that could not send one, or knows many
    names, begins a new epoch with none of them; a reader that missed one says so until the next
    epoch.

    `scheduled`: what the engine sends to workers; `new`, `cached`: what of it is about new and
    about running requests; `output`: what a worker answers; `status`: the enumeration beside it.
    """

    scheduled: type
    new: type
    cached: type
    output: type
    status: type

    NAMES = (
        ("scheduled", ("num_scheduled_tokens",)),
        ("new", ("req_id",)),
        ("cached", ("req_ids",)),
        ("output", ("req_ids", "req_id_to_index")),
    )

    def problem(self) -> str:
        """Say why they cannot be sent field by field; empty if they can."""
        for role, names in self.NAMES:
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

    @functools.cached_property
    def kinds(self) -> tuple[tuple[type, tuple[str, ...], bytes], ...]:
        """The fields of each class and, for those that hold names of requests, where both ends keep
        the last ones."""
        places = [(role, name) for role, names in self.NAMES for name in names]
        found = []
        for role, _ in self.NAMES:
            kind: type = getattr(self, role)
            fields = tuple(field.name for field in dataclasses.fields(kind))
            slots = (
                places.index((role, name)) if (role, name) in places else STEP_NO_SLOT
                for name in fields
            )
            found.append((kind, fields, bytes(slots)))
        return tuple(found)

    @functools.cached_property
    def statuses(self) -> tuple[Any, ...]:
        return tuple(self.status)  # pyright: ignore

    @functools.cached_property
    def fingerprint(self) -> int:
        layout = [(fields, slots) for _, fields, slots in self.kinds]
        statuses = list(map(str, self.statuses))
        return zlib.crc32(repr((VERSION, STEP_FORMAT, layout, statuses)).encode())


class _Reducers(dict[Any, Any]):
    """The reducers that pickle asks first: ours, then those that are registered by now."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]


class Encoder:
    """Turns objects into records. Kept between messages; one thread at a time.

    `classes`: of the steps that go field by field; then every record has to be sent, or `forget`
    called, and a `Decoder` has to take them."""

    def __init__(self, classes: StepClasses | None = None) -> None:
        self._steps = None
        if classes is not None:
            self._steps = Packer(classes.kinds, classes.statuses, classes.fingerprint)
        self._reducers = _Reducers()
        self._start()

    def _start(self) -> None:
        """Make a pickler; one that has raised, was interrupted or pickled much is not reused."""
        self._chunks: list[Any] = []
        self._buffers: list[Any] = []
        self._pickler = pickle.Pickler(
            SimpleNamespace(write=self._chunks.append),  # pyright: ignore[reportArgumentType]
            PROTOCOL,
            buffer_callback=self._take_buffer,
        )
        self._pickler.dispatch_table = self._reducers

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep it apart; True has pickle put it in band."""
        raw = buffer.raw()
        if raw.nbytes < IN_BAND_BYTES or len(self._buffers) >= MAX_BUFFERS:
            return True
        self._buffers.append(raw)
        return False

    def encode(self, obj: object) -> Record:
        """Return the pickle, or a tuple of the pickle and its buffers, which are the object's own
        memory: write the record before the object changes.

        Whatever pickling raises, the encoder is as good as new afterwards."""
        if self._chunks:  # left by an interrupted message
            self._start()
        if len(self._reducers) < ALL_TYPES:
            self._add_types()
        if self._steps is not None and type(obj) is tuple:
            step = self._steps.pack(obj)
            if step is not None:
                head, others = step
                return head if others is None else _behind(head, self._pickle(others))
        return self._pickle(obj)

    def _add_types(self) -> None:
        """Add those that have been imported by now."""
        if (numpy := sys.modules.get("numpy")) is not None:
            self._reducers[numpy.ndarray] = reduce_array
        if (torch := sys.modules.get("torch")) is not None:
            self._reducers[torch.Tensor] = reduce_tensor
            self._reducers[torch.UntypedStorage] = refuse_storage

    def forget(self) -> None:
        """Note that the last record was not sent."""
        if self._steps is not None:
            self._steps.forget()

    def _pickle(self, obj: object) -> Record:
        chunks, buffers = self._chunks, self._buffers
        try:
            self._pickler.dump(obj)
        except BaseException:
            self._start()
            raise
        head = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        record = (head, *buffers) if buffers else head
        if len(head) > SHORT_BYTES and self._pickler.__sizeof__() > MEMO_BYTES:
            self._start()
        else:
            self._pickler.clear_memo()
            buffers.clear()
            chunks.clear()
        return record


class Decoder:
    """Turns records into objects, steps of `classes` among them. Kept between messages.

    ProtocolError for another vLLM's steps, for one that follows a step which this reader has not
    had, and for damage."""

    def __init__(self, classes: StepClasses | None = None) -> None:
        self.steps = None
        if classes is not None:
            layout = classes.kinds, classes.statuses, classes.fingerprint
            self.steps = Unpacker(*layout, ProtocolError)

    def decode(self, record: "bytes | list[bytes | bytearray]") -> Any:
        """Make the object of a record from `RingReader.read`. It owns all its memory."""
        head, *buffers = (record,) if isinstance(record, bytes) else record
        if head[0] != STEP:
            return pickle.loads(head, buffers=buffers)
        if self.steps is None:
            raise ProtocolError("got a step field by field: expected the same vLLM at both ends")
        return self.steps.unpack(bytes(head), lambda rest: pickle.loads(rest, buffers=buffers))


def _behind(prefix: bytes, record: Record) -> Record:
    if isinstance(record, bytes):
        return prefix + record
    return (prefix + record[0], *record[1:])


assert MAX_BUFFERS < _shm_ring.MAX_PARTS
