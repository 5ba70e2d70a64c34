"""An engine's steps field by field: what a step's messages hold that pickle is slow with.

A call to the workers or an answer of theirs goes as tags and values, lists of integers as int32,
and a request's name once and as a number from then on (`csrc/shm/step_format.h`). Only what is
exactly of the expected type is taken; everything else in it is pickled as it is. So nothing is
guessed, and what arrives equals what pickle makes. A list or dict that a message holds twice
arrives as two.

Both ends count the steps that have names. A writer that could not send one begins a new epoch, as
it does when many names are known: with none of them. A reader that missed one says so until the
next epoch.
"""

import dataclasses
import functools
import struct
import zlib
from typing import Any

from ..errors import ProtocolError
from ._shm_ring import STEP_FORMAT, STEP_NO_SLOT, VERSION, Packer, Unpacker

MARK = b"s"
HEADER = struct.Struct("=cIIII")  # the mark, the fingerprint, epoch, number, bytes of the step


@dataclasses.dataclass(frozen=True)
class StepClasses:
    """vLLM's classes: what the engine sends to workers, what of it is about new requests and what
    about running ones, and what a worker answers, with the status beside it."""

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
        """Why they cannot be sent field by field; empty if they can."""
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
        """Of each class its fields and, for those that hold names of requests, where both ends keep
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
        """Of all that both ends must agree on."""
        layout = [(fields, slots) for _, fields, slots in self.kinds]
        statuses = list(map(str, self.statuses))
        return zlib.crc32(repr((VERSION, STEP_FORMAT, layout, statuses)).encode())


def packer(classes: StepClasses) -> Packer:
    """A writer's side."""
    return Packer(classes.kinds, classes.statuses, classes.fingerprint)


def unpacker(classes: StepClasses) -> Unpacker:
    """A reader's side. It raises ProtocolError for another vLLM's steps, for one that follows a
    step which this reader has not had, and for damage."""
    return Unpacker(classes.kinds, classes.statuses, classes.fingerprint, ProtocolError)
