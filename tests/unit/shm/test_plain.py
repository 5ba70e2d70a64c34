"""`bytes`, arrays and tensors as messages of their own."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.shm import codec
from vllm_commext.shm.codec import Encoder, decode

PICKLE = 0x80
DTYPES = ("u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16", "?")


def travel(obj: object, encoder: Encoder | None = None) -> tuple[Any, bool]:
    """What arrives, and whether it went without pickle."""
    record = (encoder or Encoder()).encode(obj)
    if isinstance(record, bytes):
        return decode(record), False
    parts = [part if isinstance(part, bytes) else bytearray(memoryview(part)) for part in record]
    return decode(parts), record[0][0] != PICKLE


def filled(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng(0)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = numbers.integers(0, 2, count, np.uint8)  # true and false for bools, small for others
    return memory.view(dtype).reshape(shape)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_arrive_as_they_were(kind: type) -> None:
    for length in (0, 1, 100_000):
        back, without_pickle = travel(kind(length))
        assert (type(back), back, without_pickle) == (kind, kind(length), True)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 70), min_size=0, max_size=4).map(tuple),
    st.sampled_from(DTYPES),
)
def test_any_dense_array_arrives(shape: tuple[int, ...], dtype: str) -> None:
    array = filled(shape, dtype)
    if array.nbytes > 1 << 22:
        array = array[:1]
    encoder = Encoder()
    for _ in range(2):  # the second time from what was kept
        back, without_pickle = travel(array, encoder)
        assert without_pickle
        assert (type(back), back.dtype, back.shape) == (np.ndarray, array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()
        assert back.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(40_000)[::2],
        np.asfortranarray(np.arange(40_000).reshape(100, 400)),
        np.arange(9_000, dtype=">i4"),
        np.arange(9_000).astype("datetime64[s]"),
        np.array([None] * 9_000, dtype=object),
        np.zeros(9_000, dtype=[("x", np.int32), ("y", "S3")]),
        np.ma.masked_array(np.arange(9_000), mask=np.arange(9_000) % 2),
        np.arange(9_000).view(np.recarray),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype}",
)
def test_any_other_array_is_pickled(array: Any) -> None:
    back, without_pickle = travel(array)
    assert not without_pickle
    assert (type(back), back.dtype, back.shape) == (type(array), array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_tensors_arrive() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dense = torch.arange(60_000, dtype=torch.int64).reshape(3, 100, 200)
    apart = dense.to(torch.float32).requires_grad_()
    for tensor, is_plain in (
        (dense, True),
        (dense.to(torch.float16), True),
        (dense % 2 == 0, True),
        (dense.to(torch.complex64), False),
        (dense.to(torch.bfloat16), False),
        (dense.transpose(0, 1), False),
        (dense[0, :1].expand(100, 200), False),
        (dense.to(torch.complex64).conj(), False),
        (apart.detach(), True),
        (apart, False),
        (torch.nn.Parameter(dense.to(torch.float32)), False),
        (dense[:, 0, 0], False),
    ):
        back, without_pickle = travel(tensor)
        assert without_pickle == is_plain, (tensor.dtype, tensor.shape)
        assert (type(back), back.dtype, back.shape) == (type(tensor), tensor.dtype, tensor.shape)
        assert back.requires_grad == tensor.requires_grad
        assert torch.equal(back, tensor)
    sparse = dense.to(torch.float32).to_sparse()
    back, without_pickle = travel(sparse)
    assert (back.layout, without_pickle) == (sparse.layout, False)
    assert torch.equal(back.to_dense(), sparse.to_dense())


def test_both_ends_keep_what_they_made_of_the_words_of_several_shapes() -> None:
    encoder = Encoder()
    arrays = [filled((rows, 4), "u1") for rows in (3, 5)]
    heads = [encoder.encode(array)[0] for array in arrays]
    assert [encoder.encode(array)[0] for array in arrays] == heads
    assert all(encoder.encode(one)[0] is head for one, head in zip(arrays, heads, strict=True))
    for array in arrays:
        travel(array, encoder)
    assert {bytes(head) for head in heads} <= codec._builders.keys()


def test_what_either_end_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MOST_KEPT", 8)
    encoder = Encoder()
    for extra in range(50):
        array = np.zeros(extra, np.uint8)
        assert travel(array, encoder)[0].shape == array.shape
    assert len(codec._builders) <= 8
    assert len(encoder._plain._heads) <= 8


def test_a_reader_without_numpy_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    record: Any = Encoder().encode(np.zeros(4, np.uint8))
    codec._builders.clear()
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match="numpy"):
        decode([record[0], bytearray(record[1])])
