"""`bytes`, arrays and tensors that are a message of their own: their memory behind a few words,
without pickle.

Pickling and unpickling such an array takes longer than copying 100 KiB of it. The words say what
the memory is and are the same for all alike, so both ends keep what they made of them. The first of
them is never that of a pickle.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .reducers import SHARED_DTYPES, is_of_numbers, numbers_of

if TYPE_CHECKING:
    import numpy as np
    import torch

BYTES, BYTEARRAY, ARRAY, TENSOR = b"b", b"a", b"n", b"t"
MOST_KEPT = 1024  # of what either end made of words

PlainRecord = tuple[bytes, Any]
Builder = Callable[[Any], Any]


class PlainEncoder:
    """`by_type`: what to try with an object of exactly this type. It returns None for one that has
    to be pickled."""

    def __init__(self) -> None:
        self.by_type: dict[type, Callable[[Any], PlainRecord | None]] = {
            bytes: lambda obj: (BYTES, obj),
            bytearray: lambda obj: (BYTEARRAY, obj),
        }
        self._heads: dict[Any, bytes] = {}

    def add_types(self) -> None:
        """For what has been imported by now: before, no object could be any of it."""
        if "numpy" in sys.modules:
            self.by_type[sys.modules["numpy"].ndarray] = self._of_array
        if "torch" in sys.modules:
            self.by_type[sys.modules["torch"].Tensor] = self._of_tensor

    def _of_array(self, array: "np.ndarray[Any, Any]") -> PlainRecord | None:
        if not is_of_numbers(array) or not array.flags.writeable:
            return None
        return self._record(ARRAY, array)

    def _of_tensor(self, tensor: "torch.Tensor") -> PlainRecord | None:
        array = numbers_of(tensor)
        return None if array is None else self._record(TENSOR, array)

    def _record(self, kind: bytes, array: "np.ndarray[Any, Any]") -> PlainRecord | None:
        key = kind, array.dtype, array.shape
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= MOST_KEPT:
                self._heads.clear()
            head = self._heads[key] = _head(*key)
        return (head, array) if head else None


def _head(kind: bytes, dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> bytes:
    """The words for such an array; empty where it has to be pickled."""
    if kind == TENSOR and dtype.name not in SHARED_DTYPES:
        return b""
    return kind + ",".join([dtype.str, *map(str, shape)]).encode()


_builders: dict[bytes, Builder] = {}


def build(head: bytes, memory: Any) -> Any:
    """The object of a plain record. It owns `memory`: `bytes` if it was, else a `bytearray`."""
    if head in (BYTES, BYTEARRAY):
        return memory
    builder = _builders.get(head)
    if builder is None:
        if len(_builders) >= MOST_KEPT:
            _builders.clear()
        builder = _builders[head] = _builder(head)
    return builder(memory)


def _builder(head: bytes) -> Builder:
    import numpy as np

    name, *lengths = head[1:].decode().split(",")
    dtype, shape, array = np.dtype(name), tuple(map(int, lengths)), np.ndarray
    if head[:1] == ARRAY:
        return lambda memory: array(shape, dtype, memory)
    from torch import from_numpy

    return lambda memory: from_numpy(array(shape, dtype, memory))
