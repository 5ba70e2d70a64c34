"""The message: what a choice of backend may depend on, as it is the same on every rank."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PACK_BYTES = 16  # what one thread of every backend's kernel loads at once


@dataclass(frozen=True)
class Message:
    """The shape and dtype of a tensor to be summed.

    Attributes:
        shape: sizes, as the tensor has them; any number of dimensions, zero among them.
        dtype: a key of `ITEM_BYTES`, as in ``torch.bfloat16`` without the prefix.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def message_of(tensor: "torch.Tensor") -> Message:
    """The tensor's shape and dtype."""
    return Message(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def message_of_bytes(num_bytes: int, dtype: str, hidden: int) -> Message:
    """Make a two-dimensional message of that many bytes, with rows of `hidden` elements or fewer.

    Rows are halved until the size holds at least one, so that small messages keep two dimensions.

    Raises:
        ValueError: the size holds no whole number of elements.
    """
    elements, rest = divmod(num_bytes, ITEM_BYTES[dtype])
    if rest or elements < 1:
        raise ValueError(f"expected whole elements of {dtype}, got {num_bytes} bytes")
    while elements % hidden:
        if hidden % 2:
            return Message((1, elements), dtype)
        hidden //= 2
    return Message((elements // hidden, hidden), dtype)
