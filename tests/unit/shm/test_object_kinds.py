"""Every kind of array and tensor arrives as it was, or `enqueue` raises; no reader crashes.

Each travels through a queue to a reader that also has to answer for what comes after it."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm_commext.shm.queue import MessageQueue

LARGE = 9_000  # elements of what goes out of band


@pytest.fixture(scope="module")
def ends() -> tuple[MessageQueue, MessageQueue]:
    writer = MessageQueue(1, 1)
    return writer, MessageQueue.create_from_handle(writer.export_handle(), 0)


Ends = tuple[MessageQueue, MessageQueue]


def travel(ends: Ends, obj: object) -> Any:
    """What arrives in a list, where it is twice and one object."""
    writer, reader = ends
    writer.enqueue([obj, {"again": obj}], timeout=30)
    first, rest = reader.dequeue(timeout=30)
    assert first is rest["again"]
    writer.enqueue("next")
    assert reader.dequeue(timeout=30) == "next"
    return first


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[], Any]] = {
    "read-only": lambda: read_only(np.arange(LARGE)),
    "read-only, small": lambda: read_only(np.arange(3)),
    "read-only, strided": lambda: read_only(np.arange(LARGE)[::2]),
    "read-only, Fortran": lambda: read_only(np.asfortranarray(np.ones((90, 100)))),
    "read-only, of objects": lambda: read_only(np.array([None, {"a": 1}], object)),
    "read-only, structured": lambda: read_only(np.zeros(9, [("x", "i4"), ("y", "S3")])),
    "from bytes": lambda: np.frombuffer(bytes(LARGE), np.uint8),
    "broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "no dimension": lambda: np.array(7.5),
    "empty": lambda: np.zeros((0, 3), np.float16),
    "reversed": lambda: np.arange(LARGE)[::-1],
    "offset": lambda: np.arange(2 * LARGE)[LARGE:],
    "big-endian": lambda: np.arange(LARGE, dtype=">i4"),
    "long double": lambda: np.arange(LARGE, dtype=np.longdouble),
    "metadata": lambda: np.zeros(LARGE, np.dtype("i4", metadata={"unit": "m"})),
    "structured": lambda: np.zeros(LARGE, [("x", np.int32), ("y", "S3")]),
    "aligned": lambda: np.zeros(9, np.dtype([("x", "i1"), ("y", "f8")], align=True)),
    "void": lambda: np.zeros(9, "V5"),
    "text": lambda: np.array(["a", "\ud800"]),
    "strings": lambda: np.array(["a", "long" * 9], np.dtypes.StringDType()),
    "days": lambda: np.arange(LARGE).astype("datetime64[D]"),
    "seconds": lambda: np.arange(LARGE).astype("timedelta64[25s]"),
    "objects": lambda: np.array([None, [1]], object),
    "matrix": lambda: np.matrix([[1, 2], [3, 4]]),
    "records": lambda: np.zeros(3, [("x", "i4")]).view(np.recarray),
    "masked": lambda: np.ma.masked_array(np.arange(9), mask=np.arange(9) % 2),
    "characters": lambda: np.char.array(["a", "b "]),
    "scalar": lambda: np.float32(1.5),
    "scalar of a structure": lambda: np.zeros(1, [("x", "i4")])[0],
}


def same_array(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.dtype.str == sent.dtype.str
    assert got.dtype.metadata == sent.dtype.metadata
    if type(sent) is np.ndarray:
        assert got.flags.writeable == sent.flags.writeable
        assert np.isfortran(got) == np.isfortran(sent)
    np.testing.assert_array_equal(np.ma.getmaskarray(got), np.ma.getmaskarray(sent))
    np.testing.assert_array_equal(got, sent)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays(kind: str, ends: Ends) -> None:
    sent = ARRAYS[kind]()
    same_array(travel(ends, sent), sent)


def test_a_mapped_file_arrives_as_one(ends: Ends, tmp_path: Any) -> None:
    sent = np.memmap(tmp_path / "file", np.int32, "w+", shape=(LARGE,))
    sent[:] = np.arange(LARGE)
    same_array(travel(ends, sent), sent)


def dense(**options: Any) -> Any:
    return torch.arange(LARGE, dtype=torch.float32, **options).reshape(90, 100)


def inferred() -> Any:
    with torch.inference_mode():
        return dense()


class Own(torch.Tensor):
    pass


TENSORS: dict[str, Callable[[], Any]] = {
    "quantized": lambda: torch.quantize_per_tensor(dense(), 0.5, 3, torch.quint8),
    "quantized, short": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "quantized, signed": lambda: torch.quantize_per_tensor(dense(), 0.5, 0, torch.qint8),
    "quantized, 32 bits": lambda: torch.quantize_per_tensor(dense(), 0.5, 0, torch.qint32),
    "quantized by channel": lambda: torch.quantize_per_channel(
        dense(), torch.full((90,), 0.5), torch.zeros(90, dtype=torch.int64), 0, torch.quint8
    ),
    "quantized, 4 bits": lambda: torch.quantize_per_channel(
        dense(), torch.full((90,), 0.5), torch.zeros(90), 0, torch.quint4x2
    ),
    "overlapping": lambda: torch.arange(9).as_strided((4, 3), (2, 1)),
    "channels last": lambda: torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
    "empty, strided": lambda: torch.zeros(4, 0).T,
    "inference": inferred,
    "conjugate": lambda: dense().to(torch.complex64).conj(),
    "negative": lambda: dense().to(torch.complex64).conj().imag,
    "negative, 16 bits": lambda: torch._neg_view(dense().bfloat16()),
    "sparse": lambda: dense().to_sparse(),
    "compressed": lambda: dense().to_sparse_csr(),
    "meta": lambda: dense().to("meta"),
}


def described(tensor: Any) -> Any:
    strides = tensor.stride() if tensor.layout is torch.strided and tensor.numel() else ()
    strides = [stride for stride, n in zip(strides, tensor.shape, strict=False) if n > 1]
    return (
        *(type(tensor), tensor.dtype, tensor.shape, tensor.layout, tensor.device.type),
        *(tensor.requires_grad, tensor.__dict__),
        *(tensor.is_quantized and tensor.qscheme(), strides),
    )


def values(tensor: Any) -> Any:
    if tensor.device.type == "meta":
        return torch.zeros(0)
    if tensor.is_quantized:
        return tensor.dequantize()
    made = tensor.detach().to_dense().resolve_conj().resolve_neg()
    return made.to(torch.complex128) if made.is_complex() else made.to(torch.float64)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(kind: str, ends: Ends) -> None:
    sent = TENSORS[kind]()
    got = travel(ends, sent)
    assert described(got) == described(sent)
    assert torch.allclose(values(got), values(sent), 0, 0, equal_nan=True)


DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
BY_TORCH = {  # which torch reads back where a tensor has more to it than its memory
    *("torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "torch.bool"),
    *("torch.complex128", "torch.complex64", "torch.uint8"),
    *("torch.int64", "torch.int32", "torch.int16", "torch.int8"),
    *("torch.qint8", "torch.qint32", "torch.quint8", "torch.quint4x2", "torch.quint2x4"),
}
FORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda tensor: tensor,
    "attribute": lambda tensor: setattr(tensor, "unit", "m") or tensor,
    "subclass": lambda tensor: tensor.as_subclass(Own),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "buffer": torch.nn.Buffer,
    "gradient": lambda tensor: tensor.requires_grad_(),
    "transposed": lambda tensor: tensor.T,
    "strided": lambda tensor: tensor[:, 1::2],
    "cut": lambda tensor: tensor[1:, 3:9],
    "expanded": lambda tensor: tensor[:1].expand(3, -1),
    "empty": lambda tensor: tensor[:0],
    "no dimension": lambda tensor: tensor[1, 1],
}


def memory_of(tensor: Any) -> bytes:
    stored = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    items = stored.view(f"V{tensor.itemsize}")[tensor.storage_offset() :]
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    return np.lib.stride_tricks.as_strided(items, tensor.shape, strides).tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_torch(dtype: str, form: str, ends: Ends) -> None:
    """Of what is seen of a type that torch cannot compute with: its memory and its attributes."""
    kind = DTYPES[dtype]
    if form == "gradient" and not (kind.is_floating_point or kind.is_complex):
        pytest.skip("only floating point numbers have gradients")
    numbers = torch.arange(40 * 32 * kind.itemsize) % 127
    rows = numbers.to(torch.uint8).reshape(40, -1) % (2 if kind is torch.bool else 128)
    if form not in ("plain", "attribute") and dtype[6] == "q":
        pytest.skip("without a quantizer torch itself makes no view of these")
    sent = FORMS[form](rows.view(kind))
    if form in ("attribute", "subclass", "buffer", "gradient") and dtype not in BY_TORCH:
        with pytest.raises((TypeError, KeyError), match="cannot send|not recognized"):
            ends[0].enqueue({"a": (sent,)})
        return
    got = travel(ends, sent)
    assert (type(got), got.dtype, got.shape) == (type(sent), kind, sent.shape)
    assert (got.requires_grad, got.__dict__) == (sent.requires_grad, sent.__dict__)
    assert memory_of(got) == memory_of(sent)


def test_what_torch_cannot_pickle_is_refused_by_enqueue(ends: Ends) -> None:
    writer, reader = ends
    shortened = dense()
    shortened.untyped_storage().resize_(100)
    gone = dense().bfloat16()
    gone.untyped_storage().resize_(0)
    zero = torch._efficientzerotensor(3)
    for sent in (shortened, gone):
        with pytest.raises(ValueError, match="it was resized"):
            writer.enqueue(sent)
    with pytest.raises((RuntimeError, NotImplementedError)):
        writer.enqueue(zero)
    writer.enqueue("next")
    assert reader.dequeue(timeout=30) == "next"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_arrive_or_are_refused(ends: Ends) -> None:
    writer, reader = ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for message in (nested, [nested]):
        try:
            writer.enqueue(message)
        except Exception:  # noqa: BLE001 - whatever torch says
            continue
        got = reader.dequeue(timeout=30)
        got = got[0] if isinstance(got, list) else got
        assert [part.tolist() for part in got.unbind()] == [[1, 1], [1, 1, 1]]
    writer.enqueue("next")
    assert reader.dequeue(timeout=30) == "next"
