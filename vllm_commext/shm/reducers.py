"""Reduces arrays and tensors for pickle: to their memory, apart, and a few words about it.

numpy's own reduction names three globals and a dtype's state, which takes longer to pickle and to
unpickle than 100 KiB to copy. Only what arrives as it was is taken; everything else is reduced by
numpy and torch themselves."""

import functools
import pickle
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import numpy as np
    import torch

PROTOCOL = 5
NUMBERS = frozenset("biufc")  # numpy's kinds of dtypes that a letter and a size describe
NUMPYS_OWN = 1  # dtype.isbuiltin of such in this machine's byte order
SHARED_DTYPES = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
)  # that numpy and torch have under the same name
QUANTIZED = frozenset(
    ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")
)  # views of them end the process where a tensor has no quantizer


def is_of_numbers(array: "np.ndarray[Any, Any]") -> bool:
    """Return whether shape, dtype and memory are all of the array, besides its writability."""
    dtype, flags = array.dtype, array.flags
    return dtype.kind in NUMBERS and dtype.isbuiltin == NUMPYS_OWN and flags.c_contiguous


def reduce_array(array: "np.ndarray[Any, Any]") -> Any:
    """Reduce a contiguous array of numbers to its memory; any other as numpy does, which forgets
    whether it may be written to."""
    if is_of_numbers(array):
        memory: Any = array
        return type(array), (array.shape, array.dtype.str, pickle.PickleBuffer(memory))
    if not array.flags.writeable:
        return _read_only, (array.copy("A"),)
    return array.__reduce_ex__(PROTOCOL)


def _read_only(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    array.flags.writeable = False
    return array


def _keys(tensor: "torch.Tensor") -> int:
    """Return torch's dispatch keys: a bit for each thing that makes a tensor special."""
    import torch

    keys: Any = torch._C._dispatch_keys(tensor)  # pyright: ignore[reportPrivateUsage]
    return keys.raw_repr()


@functools.cache
def _dense_keys() -> frozenset[int]:
    """Return the key sets of plain CPU tensors: no quantizer, no conjugate or negative bit, not
    nested, sparse, on another device or within a transform."""
    import torch

    with torch.inference_mode():
        inference = torch.empty(0)
    return frozenset((_keys(torch.empty(0)), _keys(inference)))


def is_dense(tensor: "torch.Tensor") -> bool:
    """Return whether shape, strides, dtype and memory are all of the tensor."""
    return _keys(tensor) in _dense_keys() and not tensor.requires_grad and not tensor.__dict__


def numbers_of(tensor: "torch.Tensor") -> "np.ndarray[Any, Any] | None":
    """View the memory of a contiguous tensor as an array; None where the tensor has more to it, or
    a dtype that numpy does not have.

    Raises ValueError where its storage has been shortened.
    """
    try:
        if tensor.__dict__ or not tensor.is_contiguous():
            return None
        array = tensor.numpy()
    except (RuntimeError, TypeError):
        return None
    _check_stored(tensor, array.nbytes, array.itemsize)
    return array


def _check_stored(tensor: "torch.Tensor", num_bytes: int, itemsize: int) -> None:
    stored = tensor.untyped_storage().nbytes()
    if stored < num_bytes + tensor.storage_offset() * itemsize and num_bytes:
        raise ValueError(
            f"expected a tensor whose storage has {num_bytes} bytes from element "
            f"{tensor.storage_offset()} on, got one of {stored} bytes; it was resized"
        )


def reduce_tensor(tensor: "torch.Tensor") -> Any:
    """Reduce a dense CPU tensor to its memory; any other as torch does."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype in SHARED_DTYPES and (memory := numbers_of(tensor)) is not None:
        view: Any = memory
        return rebuild_tensor, (pickle.PickleBuffer(view), memory.shape, dtype)
    if dtype in QUANTIZED or not is_dense(tensor):
        return tensor.__reduce_ex__(PROTOCOL)
    shape, strides, count = tuple(tensor.shape), tensor.stride(), tensor.numel()
    words: tuple[Any, ...] = (shape, dtype)
    if not tensor.is_contiguous():
        words = (shape, dtype, strides)
        count = 1 + sum(stride * (n - 1) for stride, n in zip(strides, shape, strict=True))
    _check_stored(tensor, count * tensor.itemsize, tensor.itemsize)
    import torch

    flat: Any = tensor.as_strided((count,), (1,)).view(torch.uint8).numpy()
    return rebuild_tensor, (pickle.PickleBuffer(flat), *words)


def rebuild_tensor(
    memory: bytearray | bytes | memoryview,
    shape: tuple[int, ...],
    dtype: str,
    strides: tuple[int, ...] | None = None,
) -> "torch.Tensor":
    """Make the tensor over `memory`, or over a copy if `memory` cannot be written to."""
    import numpy as np
    import torch

    writable = memory if isinstance(memory, bytearray) else bytearray(memory)
    if dtype in SHARED_DTYPES and strides is None:  # the faster way
        return torch.from_numpy(np.ndarray(shape, dtype, writable))
    kind: torch.dtype = getattr(torch, dtype)
    made = torch.frombuffer(writable, dtype=kind) if writable else None
    flat = torch.empty(0, dtype=torch.uint8).view(kind) if made is None else made
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def refuse_storage(_storage: "torch.UntypedStorage") -> NoReturn:
    """Refuse the storage to which torch reduces tensors of newer dtypes: it reads none back."""
    raise TypeError(
        "cannot send this tensor: torch pickles none of its dtype that has a gradient, attributes "
        "or a class of its own; send its data"
    )
