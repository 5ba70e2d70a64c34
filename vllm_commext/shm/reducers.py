"""Arrays and tensors as pickle is to take them: their memory, apart, and few words about it.

numpy's own reduction names three globals and a dtype's state, which takes longer to pickle and to
unpickle than 100 KiB to copy. Only what is named here is taken, because only that arrives as it
was; everything else is reduced by numpy and torch themselves.
"""

import functools
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

PROTOCOL = 5
NUMBERS = frozenset("biufc")  # numpy's kinds of dtypes that a letter and a size describe
NUMPYS_OWN = 1  # dtype.isbuiltin of such in this machine's byte order
SHARED_DTYPES = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
)  # that numpy and torch have under the same name
TORCH_DTYPES = frozenset(
    ("bfloat16", "complex128", "complex64", "complex32", "uint64", "uint32", "uint16")
    + ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
)  # further ones that are nothing but their bytes


def is_of_numbers(array: "np.ndarray[Any, Any]") -> bool:
    """Whether shape, dtype and memory are all of the array, besides its writability."""
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
    """The key set of torch's dispatcher: a bit for each thing that makes a tensor special."""
    import torch

    keys: Any = torch._C._dispatch_keys(tensor)  # pyright: ignore[reportPrivateUsage]
    return keys.raw_repr()


@functools.cache
def _dense_keys() -> frozenset[int]:
    """The key sets of dense CPU tensors without anything else about them: no quantizer, no
    conjugate or negative bit, not nested, sparse, on another device or within a transform."""
    import torch

    with torch.inference_mode():
        inference = torch.empty(0)
    return frozenset((_keys(torch.empty(0)), _keys(inference)))


def is_dense(tensor: "torch.Tensor") -> bool:
    """Whether shape, strides, dtype and memory are all of the tensor."""
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


def _bytes_of(tensor: "torch.Tensor") -> "np.ndarray[Any, Any] | None":
    """As `numbers_of`, for TORCH_DTYPES, as bytes; None also for a number without a shape."""
    import torch

    is_wrapper: Any = torch._is_functional_tensor  # pyright: ignore
    if tensor.requires_grad or tensor.__dict__ or is_wrapper(tensor):
        return None
    if not (tensor.ndim and tensor.is_contiguous()):
        return None
    try:
        array = tensor.view(torch.uint8).numpy()
    except (RuntimeError, TypeError):
        return None
    _check_stored(tensor, array.nbytes, tensor.itemsize)
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
    if dtype in TORCH_DTYPES and (memory := _bytes_of(tensor)) is not None:  # the faster way
        view = memory
        return rebuild_tensor, (pickle.PickleBuffer(view), tuple(tensor.shape), dtype)
    if (dtype not in SHARED_DTYPES and dtype not in TORCH_DTYPES) or not is_dense(tensor):
        return tensor.__reduce_ex__(PROTOCOL)
    shape, strides, count = tuple(tensor.shape), tensor.stride(), tensor.numel()
    words: tuple[Any, ...] = (shape, dtype)
    if not tensor.is_contiguous():
        words = (shape, dtype, strides)
        count = 1 + sum(stride * (n - 1) for stride, n in zip(strides, shape, strict=True))
    _check_stored(tensor, count * tensor.itemsize, tensor.itemsize)
    return rebuild_tensor, (pickle.PickleBuffer(_flat_bytes(tensor, count)), *words)


def _flat_bytes(tensor: "torch.Tensor", count: int) -> Any:
    import torch

    return tensor.as_strided((count,), (1,)).view(torch.uint8).numpy()


def rebuild_tensor(
    memory: bytearray | bytes | memoryview,
    shape: tuple[int, ...],
    dtype: str,
    strides: tuple[int, ...] | None = None,
) -> "torch.Tensor":
    """The tensor over `memory`, which it keeps; over a copy if `memory` cannot be written to."""
    import numpy as np
    import torch

    writable = memory if isinstance(memory, bytearray) else bytearray(memory)
    if dtype in SHARED_DTYPES and strides is None:  # the faster way
        return torch.from_numpy(np.ndarray(shape, dtype, writable))
    kind: torch.dtype = getattr(torch, dtype)
    flat = torch.frombuffer(writable, dtype=kind) if writable else torch.empty(0, dtype=kind)
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)
