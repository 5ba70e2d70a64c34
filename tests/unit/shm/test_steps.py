"""Steps as columns arrive as pickle would have made them, whatever they hold."""

import pickle
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

from vllm_commext.errors import ProtocolError
from vllm_commext.shm.codec import Decoder, Encoder
from vllm_commext.shm.steps import MARK, StepClasses


class Status(Enum):
    SUCCESS = auto()
    FAILURE = auto()


@dataclass
class Cached:
    req_ids: Any
    new_block_ids: Any
    num_computed_tokens: Any
    num_output_tokens: Any


@dataclass
class Scheduled:
    scheduled_new_reqs: Any
    scheduled_cached_reqs: Any
    num_scheduled_tokens: Any
    connector_metadata: Any = None


@dataclass
class Output:
    req_ids: Any
    req_id_to_index: Any
    sampled_token_ids: Any
    logprobs: Any = None
    empty: Any = field(default_factory=dict)


class Name(str):
    """Equal to a str, and none."""


CLASSES = StepClasses(Scheduled, Cached, Output, Status)
NAMES = st.lists(st.sampled_from([f"request-{n}" for n in range(12)]), max_size=8)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.just(Name("request-1")),
    st.tuples(st.integers(0, 3)),
    st.lists(st.integers(0, 3), max_size=3),
)
INTEGERS = st.one_of(st.integers(0, 9), st.integers(-9, 2**31 - 1), st.integers(-(2**33), 2**33))


def seldom_odd(draw: st.DrawFn, usual: Any) -> Any:
    return draw(ODD) if draw(st.integers(0, 9)) == 0 else usual


def list_like(draw: st.DrawFn, names: list[str], values: st.SearchStrategy[Any]) -> Any:
    n, kind = len(names), draw(st.integers(0, 9))
    if kind < 5:
        return draw(st.lists(values, min_size=n, max_size=n))
    if kind < 8:
        return [7] * n
    return seldom_odd(draw, draw(st.lists(st.one_of(values, ODD), max_size=n + 1)))


@st.composite
def names_of(draw: st.DrawFn) -> Any:
    names = draw(NAMES)
    odd = draw(st.integers(0, 9)) == 0
    return [*names, draw(ODD)] if odd else names


def as_dict(names: Any, values: Any) -> Any:
    keys = [name for name in names if isinstance(name, str)]
    return dict(zip(keys, values if isinstance(values, list) else [values] * 99, strict=False))


@st.composite
def call(draw: st.DrawFn) -> Any:
    names = draw(names_of())
    keyed = names if draw(st.booleans()) else [*draw(NAMES), *names]
    cached = Cached(
        names,
        [draw(st.one_of(st.none(), st.just(([3],)))) for _ in names],
        list_like(draw, names, INTEGERS),
        list_like(draw, names, INTEGERS),
    )
    lengths = 1 if draw(st.booleans()) else list_like(draw, keyed, INTEGERS)
    tokens = seldom_odd(draw, as_dict(keyed, lengths))
    made = Scheduled([], seldom_odd(draw, cached), tokens, draw(ODD))
    if draw(st.integers(0, 9)) == 0:
        made.unexpected = 1  # pyright: ignore[reportAttributeAccessIssue]
    return "execute_model", (made, draw(ODD)), {"timeout": draw(ODD)}, draw(ODD)


@st.composite
def answer(draw: st.DrawFn) -> Any:
    names = draw(names_of())
    index = {name: place for place, name in enumerate(names) if isinstance(name, str)}
    if draw(st.integers(0, 3)) == 0:
        index = dict(reversed(list(index.items())))
    longest = draw(st.integers(1, 2))
    rows = list_like(draw, names, st.lists(INTEGERS, min_size=1, max_size=longest))
    output = Output(names, seldom_odd(draw, index), rows, draw(ODD))
    return seldom_odd(draw, draw(st.sampled_from(Status))), output


def exactly(obj: Any) -> Any:
    """Something that is equal only for objects that are equal in every type and order."""
    if isinstance(obj, (Cached, Scheduled, Output)):
        return type(obj), exactly(obj.__dict__)
    if isinstance(obj, dict):
        return dict, [(exactly(key), exactly(value)) for key, value in obj.items()]
    if isinstance(obj, (list, tuple)):
        return type(obj), [exactly(item) for item in obj]
    return type(obj), obj


@settings(max_examples=150)
@given(st.lists(st.tuples(st.one_of(call(), answer()), st.booleans()), max_size=8))
def test_any_steps_arrive_as_pickle_would_have_made_them(steps: list[tuple[Any, bool]]) -> None:
    encoder, decoder = Encoder(CLASSES), Decoder(CLASSES)
    for message, is_sent in steps:
        record = encoder.encode(message)
        if not is_sent:
            encoder.forget()
            continue
        assert isinstance(record, bytes)
        assert exactly(decoder.decode(record)) == exactly(pickle.loads(pickle.dumps(message)))


def step(n: int, begin: int = 0) -> Any:
    names = [f"request-{number}" for number in range(begin, begin + n)]
    cached = Cached(names, [None] * n, list(range(n)), [3] * n)
    return "execute_model", (Scheduled([], cached, dict.fromkeys(names, 1)),), {}, 0


def test_steps_are_sent_as_columns_and_names_only_once() -> None:
    encoder = Encoder(CLASSES)
    first, second, third = (encoder.encode(step(100, at)) for at in (0, 0, 1))
    assert first[:1] == second[:1] == third[:1] == MARK
    assert len(second) < len(first) - 900
    assert len(third) < len(first) - 500  # the names' numbers, and one that is new
    assert len(pickle.dumps(step(100))) > len(second) * 2


def test_the_received_lists_are_the_receivers_own() -> None:
    encoder, decoder = Encoder(CLASSES), Decoder(CLASSES)
    for _ in range(3):
        got = decoder.decode(encoder.encode(step(5)))  # pyright: ignore[reportArgumentType]
        assert exactly(got) == exactly(step(5))
        got[1][0].scheduled_cached_reqs.req_ids.clear()
        got[1][0].num_scheduled_tokens.clear()


def test_what_the_writer_changes_afterwards_does_not_count_as_sent() -> None:
    encoder, decoder = Encoder(CLASSES), Decoder(CLASSES)
    message = step(5)
    decoder.decode(encoder.encode(message))  # pyright: ignore[reportArgumentType]
    message[1][0].scheduled_cached_reqs.req_ids[2] = "another"
    got = decoder.decode(encoder.encode(message))  # pyright: ignore[reportArgumentType]
    assert got[1][0].scheduled_cached_reqs.req_ids[2] == "another"


def test_large_arrays_among_the_fields_go_out_of_band() -> None:
    encoder, decoder = Encoder(CLASSES), Decoder(CLASSES)
    array = np.arange(50_000)
    record = encoder.encode((Status.SUCCESS, Output(["a"], {"a": 0}, [[5]], array)))
    assert isinstance(record, tuple)
    status, got = decoder.decode([record[0], bytearray(record[1])])
    assert (status, got.sampled_token_ids) == (Status.SUCCESS, [[5]])
    np.testing.assert_array_equal(got.logprobs, array)


class Explodes:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_a_field_that_cannot_be_unpickled_costs_only_its_own_step() -> None:
    encoder, decoder = Encoder(CLASSES), Decoder(CLASSES)
    bad = step(5)
    bad[1][0].connector_metadata = Explodes()
    with pytest.raises(ZeroDivisionError):
        decoder.decode(encoder.encode(bad))  # pyright: ignore[reportArgumentType]
    assert exactly(decoder.decode(encoder.encode(step(5)))) == exactly(step(5))  # pyright: ignore


def test_a_lost_step_is_noticed_and_the_next_epoch_is_understood() -> None:
    encoder, decoder = Encoder(CLASSES), Decoder(CLASSES)
    decoder.decode(encoder.encode(step(5)))  # pyright: ignore[reportArgumentType]
    encoder.encode(step(6))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="lost one"):
            decoder.decode(encoder.encode(step(6)))  # pyright: ignore[reportArgumentType]
    encoder.forget()
    got = decoder.decode(encoder.encode(step(6)))  # pyright: ignore[reportArgumentType]
    assert exactly(got) == exactly(step(6))


def test_an_epoch_ends_by_itself() -> None:
    encoder, decoder = Encoder(CLASSES), Decoder(CLASSES)
    for number in range(5000):
        got = decoder.decode(encoder.encode(step(4, number * 4)))  # pyright: ignore
    assert exactly(got) == exactly(step(4, 4999 * 4))


@dataclass
class Renamed:
    requests: Any


class Plain:
    req_ids: Any


@dataclass
class Special(Cached):
    def __reduce__(self) -> Any:
        return Cached, (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Renamed, "Renamed has no num_computed_tokens, num_output_tokens, req_ids"),
        (Plain, "Plain is no dataclass"),
        (Special, "Special is pickled in a way of its own"),
    ],
)
def test_classes_that_differ_are_found_at_the_start(kind: type, problem: str) -> None:
    assert CLASSES.problem() == ""
    assert StepClasses(Scheduled, kind, Output, Status).problem() == problem


def test_another_layout_is_refused() -> None:
    @dataclass
    class Longer(Output):
        more: int = 0

    encoder = Encoder(StepClasses(Scheduled, Cached, Longer, Status))
    with pytest.raises(ProtocolError, match="other fields"):
        Decoder(CLASSES).decode(encoder.encode(step(2)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProtocolError, match="as columns"):
        Decoder().decode(encoder.encode(step(2)))  # pyright: ignore[reportArgumentType]
