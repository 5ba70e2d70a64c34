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


def test_only_contiguous_numbers_go_without_pickle() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dense = torch.arange(600).reshape(3, 200)
    for tensor in (dense, dense.to(torch.float16), dense % 2 == 0):
        assert travel(tensor)[1]
        assert travel(tensor.numpy())[1]
    for tensor in (dense.bfloat16(), dense.T, dense.to_sparse(), torch.nn.Buffer(dense)):
        assert not travel(tensor)[1]
    for array in (np.arange(9)[::2], np.arange(9, dtype=">i4"), np.array([None])):
        assert not travel(array)[1]


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
