"""Arrays and tensors as pickle is to take them: their memory, apart, and few words about it.

numpy's own reduction names three globals and a dtype's state, which takes longer to pickle and to
unpickle than 100 KiB to copy.
"""

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


def reduce_array(array: "np.ndarray[Any, Any]") -> Any:
    """Reduce a contiguous array of numbers to its memory; any other as numpy does."""
    dtype = array.dtype
    if dtype.kind in NUMBERS and dtype.isbuiltin == NUMPYS_OWN and array.flags.c_contiguous:
        memory: Any = array
        return type(array), (array.shape, dtype.str, pickle.PickleBuffer(memory))
    return array.__reduce_ex__(PROTOCOL)


def reduce_tensor(tensor: "torch.Tensor") -> Any:
    """Reduce a dense CPU tensor to its memory, of whatever dtype; any other as torch does."""
    import torch

    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.requires_grad:
        return tensor.__reduce_ex__(PROTOCOL)
    dtype, dense = str(tensor.dtype).removeprefix("torch."), tensor.contiguous()
    try:
        memory: Any = (
            dense if dtype in SHARED_DTYPES else dense.flatten().view(torch.uint8)
        ).numpy()
    except RuntimeError:  # a conjugate or negative view, whose bytes are not its values
        return tensor.__reduce_ex__(PROTOCOL)
    return rebuild_tensor, (pickle.PickleBuffer(memory), tuple(tensor.shape), dtype)


def rebuild_tensor(
    memory: bytearray | bytes | memoryview, shape: tuple[int, ...], dtype: str
) -> "torch.Tensor":
    """The tensor over `memory`, which it keeps; over a copy if `memory` cannot be written to."""
    import numpy as np
    import torch

    writable = memory if isinstance(memory, bytearray) else bytearray(memory)
    if dtype in SHARED_DTYPES:
        return torch.from_numpy(np.ndarray(shape, dtype, writable))
    kind: torch.dtype = getattr(torch, dtype)
    if not writable:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(writable, dtype=kind).view(shape)
