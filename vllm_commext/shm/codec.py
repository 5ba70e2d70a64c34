"""Python objects to the parts of a record and back: pickle protocol 5, large contents out of band.

A part is written to the ring straight from the object's memory, and received straight into the
memory that the new object owns. This goes for what takes part in pickle's buffer protocol (numpy
arrays), for CPU tensors of torch, and for `bytes` that are the message itself.
"""

import copyreg
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ProtocolError
from . import _shm_ring
from .plain import PlainEncoder, build
from .reducers import PROTOCOL, reduce_array, reduce_tensor
from .steps import MARK, StepClasses, packer, unpacker

IN_BAND_BYTES = 16 << 10  # inside a pickle; below, a part of its own costs more than its copies
MEMO_BYTES = 16 << 10  # of a pickler that is kept: to clear its memo takes time for all that the
# largest message ever put there, and longer than a new pickler beyond this
MAX_BUFFERS = 64  # of one message; more go in band. Fewer than any ring's parts.

PICKLE, STEP = 0x80, MARK[0]  # the first byte of a record that is none of the plain ones
SHORT_BYTES = 512  # of a pickle whose memo is below MEMO_BYTES: an entry takes two bytes or more

Record = bytes | tuple[Any, ...]
Reducers = Mapping[type, Callable[[Any], Any]]


class _Sink:
    """The file that a pickler writes to: a list of the chunks as they come."""

    __slots__ = ("write",)

    def __init__(self, write: Callable[[Any], Any]) -> None:
        self.write = write


class _Reducers(dict[Any, Any]):
    """What pickle asks first: ours, then those that are registered by now."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]

    def add_ours(self) -> None:
        """For what has been imported by now: before, no object could hold any of it."""
        if "numpy" in sys.modules:
            self[sys.modules["numpy"].ndarray] = reduce_array
        if "torch" in sys.modules:
            self[sys.modules["torch"].Tensor] = reduce_tensor


class Encoder:
    """Turns objects into records. Kept between messages; one thread at a time.

    `classes`: of the steps that go field by field; then every record has to be sent, or `forget`
    called, and a `Decoder` has to take them. `reducers`: of types that are pickled so and in no
    other way.
    """

    def __init__(
        self, classes: StepClasses | None = None, reducers: Reducers | None = None
    ) -> None:
        self._given = reducers or {}
        self._plain = PlainEncoder()
        self._steps = packer(classes) if classes is not None else None
        self._reducers = _Reducers()
        self._start()

    def _start(self) -> None:
        """From scratch: a pickler that has raised, or was interrupted, is not used again, nor one
        that has pickled much."""
        self._chunks: list[Any] = []
        self._buffers: list[Any] = []
        self._pickler = pickle.Pickler(
            _Sink(self._chunks.append),  # pyright: ignore[reportArgumentType]
            PROTOCOL,
            buffer_callback=self._take_buffer,
        )
        self._pickler.dispatch_table = self._reducers

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether pickle shall put it in band."""
        raw = buffer.raw()
        if raw.nbytes < IN_BAND_BYTES or len(self._buffers) >= MAX_BUFFERS:
            return True
        self._buffers.append(raw)
        return False

    def encode(self, obj: object) -> Record:
        """The record for `obj`: the pickle, or a tuple of the pickle and its buffers, which are
        the object's own memory: write the record before the object changes.

        Whatever pickling raises, the encoder is as good as new afterwards.
        """
        if self._chunks:  # left by an interrupted message
            self._start()
        if len(self._reducers) < 2:
            self._add_types()
        if type(obj) is tuple:
            if self._steps is not None and (step := self._steps.pack(obj)) is not None:
                head, others = step
                return head if others is None else _behind(head, self._pickle(others))
            return self._pickle(obj)
        plain = self._plain.by_type.get(type(obj))
        if plain is not None and (record := plain(obj)) is not None:
            return record
        return self._pickle(obj)

    def _add_types(self) -> None:
        self._reducers.add_ours()
        self._reducers.update(self._given)
        self._plain.add_types()
        for kind in self._given:
            self._plain.by_type.pop(kind, None)

    def forget(self) -> None:
        """The last record was not sent."""
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
    """Turns records into objects: `decode`, and the steps of `classes`. Kept between messages."""

    def __init__(self, classes: StepClasses | None = None) -> None:
        self._steps = unpacker(classes) if classes is not None else None

    def decode(self, record: "bytes | list[bytes | bytearray]") -> Any:
        """The object of a record as `RingReader.read` returns it. It owns all its memory."""
        buffers: list[bytes | bytearray] = []
        if isinstance(record, bytes):
            if record[0] != STEP:
                return pickle.loads(record)
            head = record
        else:
            if record[0][0] == PICKLE:
                return pickle.loads(record[0], buffers=record[1:])
            head, *buffers = record
            if head[0] != STEP:
                return build(bytes(head), buffers[0])
        if self._steps is None:
            raise ProtocolError("got a step field by field: expected the same vLLM at both ends")
        return self._steps.unpack(bytes(head), lambda rest: pickle.loads(rest, buffers=buffers))


decode = Decoder().decode  # of what was sent without steps


def _behind(prefix: bytes, record: Record) -> Record:
    """The record with the prefix in front of its pickle."""
    if isinstance(record, bytes):
        return prefix + record
    return (prefix + record[0], *record[1:])


assert MAX_BUFFERS < _shm_ring.MAX_PARTS
