"""Objects to records and back, without a ring."""

import copyreg
import datetime
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from vllm_commext.shm.codec import IN_BAND_BYTES, MAX_BUFFERS, MEMO_BYTES, Decoder, Encoder


def decoded(record: Any) -> Any:
    if not isinstance(record, bytes):
        record = [one if isinstance(one, bytes) else bytearray(memoryview(one)) for one in record]
    return Decoder().decode(record)


def travel(obj: object, encoder: Encoder | None = None) -> tuple[Any, int]:
    record = (encoder or Encoder()).encode(obj)
    return decoded(record), 1 if isinstance(record, bytes) else len(record)


LARGE = bytes(range(256)) * 400


class Bytes(bytes):
    pass


class Array(bytearray):
    pass


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {"a": [1, 2.5, "text"], (1, 2): {3}},
        LARGE,
        [LARGE, [LARGE * 2, "between", bytearray(LARGE)], LARGE * 3],
        [list(range(100_000)), LARGE, list(range(100_000)), LARGE * 2],
        "\u20ac" * 100_000,
        list(range(30_000)),  # two frames of pickle's
        *(Bytes(LARGE), Array(LARGE), bytearray(LARGE), b"", memoryview),
    ],
)
def test_an_object_arrives_equal(obj: object) -> None:
    assert travel(obj) == (obj, 1)
    assert type(travel(obj)[0]) is type(obj)


def test_an_encoder_does_not_keep_the_memo_of_a_large_message() -> None:
    """Clearing it would take as long for every message from then on."""
    encoder = Encoder()
    for message in ([str(number) for number in range(100_000)], "small"):
        assert travel(message, encoder) == (message, 1)
        assert sys.getsizeof(encoder._pickler) <= MEMO_BYTES


def test_a_tensor_goes_as_its_memory() -> None:
    numbers = torch.arange(10_000)
    tensors = [numbers, numbers.bfloat16(), numbers.reshape(100, 100)[:, ::2]]
    back, n_parts = travel(tensors)
    assert n_parts == 1 + len(tensors)
    assert all(map(torch.equal, back, tensors))


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
