"""Objects to records and back, without a ring."""

import copyreg
import datetime
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from tests.kit.examples import examples
from vllm_commext.shm.codec import IN_BAND_BYTES, MAX_BUFFERS, MEMO_BYTES, Encoder, decode


def travel(obj: object, encoder: Encoder | None = None) -> tuple[Any, int]:
    """What arrives, and in how many parts."""
    record = (encoder or Encoder()).encode(obj)
    if isinstance(record, bytes):
        return decode(record), 1
    parts = [bytes(part) if isinstance(part, bytes) else bytearray(part) for part in record]
    return decode(parts), len(parts)


LARGE = bytes(range(256)) * 400


@pytest.mark.parametrize(
    ("obj", "n_parts"),
    [
        (None, 1),
        ({"a": [1, 2.5, "text"], (1, 2): {3}}, 1),
        (LARGE, 2),
        ([LARGE, [LARGE * 2, "between", bytearray(LARGE)], LARGE * 3], 1),
        ((LARGE, LARGE), 1),
        ([list(range(100_000)), LARGE, list(range(100_000)), LARGE * 2], 1),
        ("\u20ac" * 100_000, 1),
        (list(range(30_000)), 1),  # two frames of pickle's
    ],
)
def test_an_object_arrives_equal(obj: object, n_parts: int) -> None:
    assert travel(obj) == (obj, n_parts)


def test_an_encoder_does_not_keep_the_memo_of_a_large_message() -> None:
    """Clearing it would take as long for every message from then on."""
    encoder = Encoder()
    for message in ([str(number) for number in range(100_000)], "small"):
        assert travel(message, encoder) == (message, 1)
        assert sys.getsizeof(encoder._pickler) <= MEMO_BYTES


def test_an_array_goes_as_its_memory_and_a_few_words() -> None:
    for array in (np.arange(3), np.arange(100_000)):
        record = Encoder().encode([array])
        head = record if isinstance(record, bytes) else record[0]
        assert len(head) < len(pickle.dumps([np.arange(3)], 5)) - 20


def test_a_tensor_goes_as_its_memory() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    numbers = torch.arange(10_000)
    tensors = [numbers, numbers.bfloat16(), numbers.reshape(100, 100)[:, ::2]]
    back, n_parts = travel(tensors)
    assert n_parts == 1 + len(tensors)
    assert all(map(torch.equal, back, tensors))


def test_what_arrives_has_the_order_of_what_was_sent() -> None:
    parts = [LARGE + bytes([i]) if i % 2 else np.full(9_000, i) for i in range(20)]
    back, n_parts = travel(parts)
    assert n_parts == 11
    for expected, got in zip(parts, back, strict=True):
        np.testing.assert_array_equal(expected, got)


@examples(10)
@given(
    st.recursive(
        st.one_of(
            st.none(),
            st.integers(),
            st.text(),
            st.binary(),
            st.integers(60_000, 70_000).map(bytes),
            st.integers(60_000, 70_000).map(bytearray),
            st.datetimes().filter(lambda moment: moment.year > 1970),
        ),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
        max_leaves=12,
    )
)
def test_any_object_arrives_equal(obj: object) -> None:
    assert travel(obj)[0] == obj


class Refuses:
    def __reduce__(self) -> Any:
        raise KeyError("not to be pickled")


def test_an_error_in_pickling_leaves_the_encoder_as_new() -> None:
    encoder, shared = Encoder(), [1, 2, 3]
    for obj in (Refuses(), [shared, LARGE, Refuses()], lambda: 0):
        with pytest.raises((KeyError, pickle.PicklingError, AttributeError)):
            encoder.encode(obj)
        assert travel([shared, shared], encoder) == ([shared, shared], 1)


def test_messages_do_not_know_one_another() -> None:
    encoder, shared = Encoder(), ["shared"]
    assert travel([shared, LARGE], encoder)[0] == [shared, LARGE]
    shared.append("more")
    assert travel([shared, LARGE], encoder)[0] == [["shared", "more"], LARGE]


class Marked:
    pass


def test_a_reducer_registered_later_is_used() -> None:
    encoder = Encoder()
    encoder.encode(1)
    copyreg.pickle(Marked, lambda _: (str, ("reduced",)))
    try:
        assert travel(Marked(), encoder)[0] == "reduced"
    finally:
        del copyreg.dispatch_table[Marked]
    assert isinstance(travel(Marked(), encoder)[0], Marked)
    assert travel(datetime.date(2000, 1, 1), encoder)[0] == datetime.date(2000, 1, 1)


@pytest.mark.parametrize("more", [0, 1, 9])
def test_beyond_the_bound_buffers_travel_in_band(more: int) -> None:
    arrays = [np.full(IN_BAND_BYTES, number, np.uint8) for number in range(MAX_BUFFERS + more)]
    back, n_parts = travel(arrays)
    assert n_parts == 1 + MAX_BUFFERS
    assert all(np.array_equal(got, sent) for got, sent in zip(back, arrays, strict=True))
