"""Steps that go field by field arrive as pickle would have made them, whatever they hold."""

import contextlib
import gc
import pickle
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from vllm_commext.errors import ProtocolError
from vllm_commext.shm._shm_ring import Packer
from vllm_commext.shm.codec import MARK, Decoder, Encoder, StepClasses


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
class New:
    req_id: Any
    prompt_token_ids: Any
    sampling_params: Any = None


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


class Number(int):
    pass


class Real(float):
    pass


class Names(list[Any]):
    pass


class Keyed(dict[Any, Any]):
    pass


class Colour(IntEnum):
    RED = 1


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class MoreCached(Cached):
    """Equal to none of the classes, though it is one of them."""


CLASSES = StepClasses(Scheduled, New, Cached, Output, Status)
NAMES = st.lists(st.sampled_from([f"request-{n}" for n in range(12)]), max_size=8)
SMALL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.text(st.characters(categories=("Cs", "Lu")), max_size=3),
    st.sampled_from(["request-1", "request-20", Name("request-1"), b"bytes", *Status]),
    st.sampled_from([Number(3), Real(1.5), Colour.RED, -0.0, 1j, 2**63, -(2**63), "\ud83d\ude00"]),
    st.sampled_from([np.int32(7), np.float64(1.5), np.bool_(True), np.str_("request-1")]),
)


def bytearray_or_deque(items: list[Any]) -> Any:
    return deque(items) if items else bytearray(b"bytes")


ODD = st.recursive(
    SMALL,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(SMALL, inner, max_size=3),
        st.sets(SMALL, max_size=3),
        st.frozensets(SMALL, max_size=2),
        st.builds(New, inner, inner),
        st.lists(inner, max_size=3).map(Names),
        st.lists(SMALL, max_size=3).map(bytearray_or_deque),
        st.builds(Pair, inner, inner),
        st.dictionaries(SMALL, inner, max_size=3).map(Keyed),
        st.dictionaries(SMALL, inner, max_size=3).map(OrderedDict),
        st.dictionaries(SMALL, inner, max_size=3).map(lambda made: defaultdict(list, made)),
        st.builds(MoreCached, inner, inner, inner, inner),
    ),
    max_leaves=8,
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
    fresh = [
        New(f"request-{draw(st.integers(0, 20))}", list_like(draw, names, INTEGERS), draw(ODD))
        for _ in range(draw(st.integers(0, 2)))
    ]
    made = Scheduled(fresh, seldom_odd(draw, cached), tokens, draw(ODD))
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
    if isinstance(obj, (New, Cached, Scheduled, Output)):
        return type(obj), exactly(obj.__dict__)
    if isinstance(obj, dict):
        return type(obj), [(exactly(key), exactly(value)) for key, value in obj.items()]
    if isinstance(obj, (list, tuple, deque)):
        return type(obj), [exactly(item) for item in obj]
    if isinstance(obj, (set, frozenset)):
        return type(obj), sorted(repr((type(item), item)) for item in obj)
    return type(obj), repr(obj) if isinstance(obj, (float, complex)) else obj


@st.composite
def other_message(draw: st.DrawFn) -> Any:
    """Calls and answers without a step, and what is neither."""
    status = draw(st.sampled_from(Status))
    return draw(
        st.one_of(
            st.tuples(st.text(max_size=5), st.tuples(ODD), st.just({}), ODD),
            st.tuples(st.just(status), ODD),
            st.tuples(ODD, ODD),
        )
    )


@examples(15)
@given(st.lists(st.tuples(st.one_of(call(), answer(), other_message()), st.booleans()), max_size=8))
def test_any_steps_arrive_as_pickle_would_have_made_them(steps: list[tuple[Any, bool]]) -> None:
    link = Link()
    for message, is_sent in steps:
        if is_sent:
            record = link.encoder.encode(message)
            assert isinstance(record, bytes)
            assert exactly(link.receive(record)) == exactly(pickle.loads(pickle.dumps(message)))
        else:
            link.encoder.encode(message)
            link.encoder.forget()


class StepSource:
    """Requests that come and end, in an engine's order and in a worker's, who puts who comes into
    the place of who has ended."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.batch: list[str] = []
        self.places: dict[str, int] = {}
        self._number = 0

    def turn(self, ended: list[int], n_new: int) -> tuple[Any, Any]:
        """The next step's call and answer; `ended`: places among those that run."""
        gone = {self.running[place % len(self.running)] for place in ended if self.running}
        fresh = [f"request-{self._number + place}" for place in range(n_new)]
        self._number += n_new
        self.running = [name for name in self.running if name not in gone]
        free = [place for place, name in enumerate(self.batch) if name in gone]
        for name in gone:
            del self.places[name]
        for name in fresh:
            place = free.pop(0) if free else len(self.batch)
            self.batch[place : place + 1] = [name]
            self.places[name] = place
        for place in reversed(free):  # the last one moves into the gap
            last = self.batch.pop()
            if last not in gone and place < len(self.batch):
                self.batch[place], self.places[last] = last, place
        n = len(self.running)
        cached = Cached(list(self.running), [None] * n, list(range(n)), [9] * n)
        tokens = dict.fromkeys(self.running, 1) | dict.fromkeys(fresh, 64)
        made = Scheduled([New(name, [5, 6]) for name in fresh], cached, tokens)
        self.running += fresh
        rows = [[place] for place in range(len(self.batch))]
        output = Output(list(self.batch), dict(self.places), rows)
        return ("execute_model", (made,), {}, 0), (Status.SUCCESS, output)


TURNS = st.tuples(st.lists(st.integers(0, 40), max_size=3), st.integers(0, 3), st.booleans())


@examples(10)
@given(st.integers(0, 30), st.lists(TURNS, max_size=20))
def test_requests_that_come_and_end(
    at_first: int, turns: list[tuple[list[int], int, bool]]
) -> None:
    source, links = StepSource(), (Link(), Link())
    for ended, n_new, is_sent in [([], at_first, True), *turns]:
        for link, message in zip(links, source.turn(ended, n_new), strict=True):
            if is_sent:
                link.arrives(message)
            else:
                link.encoder.encode(message)
                link.encoder.forget()


def test_a_request_that_comes_or_ends_costs_few_bytes() -> None:
    source, encoder = StepSource(), Encoder(CLASSES)
    sizes = []
    for ended, n_new in (([], 200), ([], 0), ([], 0), ([7], 0), ([], 1), ([], 0)):
        record = encoder.encode(source.turn(ended, n_new)[0])
        assert isinstance(record, bytes)
        sizes.append(len(record))
    steady = sizes[2]  # the numbers of tokens, and that the names are the same
    assert max(sizes[3:]) < steady + 1000  # with 200 lengths, as who comes has more than one token
    assert sizes[3] < steady + 40


# Ours, and those of Unicode, of dicts and of sets.
DAMAGE = ProtocolError, UnicodeError, TypeError, KeyError


def refuse(_: bytes) -> Any:
    """In place of pickle, to which damaged bytes can say anything."""
    raise ProtocolError("nothing was pickled")


@given(st.data())
def test_damage_is_an_error_or_another_message(data: st.DataObject) -> None:
    """And never a crash, or a reader that cannot go on."""
    source, encoder, decoder = StepSource(), Encoder(CLASSES), Decoder(CLASSES).steps
    for ended, n_new in (([], 5), ([1], 1), ([2, 3], 0)):
        record: Any = encoder.encode(source.turn(ended, n_new)[0])
        if data.draw(st.booleans()):
            at = data.draw(st.integers(9, len(record) - 1))
            kind = data.draw(st.integers(0, 2))
            byte = bytes([data.draw(st.integers(0, 255))])
            record = record[:at] + (b"", byte, byte + record[at:])[kind] + record[at + kind :]
        with contextlib.suppress(*DAMAGE):
            decoder.unpack(record, refuse)
    encoder.forget()
    message = source.turn([0], 2)[0]
    record = encoder.encode(message)
    assert exactly(decoder.unpack(record, refuse)) == exactly(message)


def step(n: int, begin: int = 0) -> Any:
    names = [f"request-{number}" for number in range(begin, begin + n)]
    cached = Cached(names, [None] * n, list(range(n)), [3] * n)
    return "execute_model", (Scheduled([], cached, dict.fromkeys(names, 1)),), {}, 0


class Link:
    def __init__(self) -> None:
        self.encoder, self.decoder = Encoder(CLASSES), Decoder(CLASSES)

    def send(self, message: object) -> Any:
        return self.receive(self.encoder.encode(message))

    def receive(self, record: Any) -> Any:
        return self.decoder.decode(record)

    def arrives(self, message: object) -> None:
        assert exactly(self.send(message)) == exactly(message)


@pytest.fixture
def link() -> Link:
    return Link()


def test_a_message_that_holds_itself_or_one_list_very_often_is_pickled(link: Link) -> None:
    link.arrives(step(5))
    many: Any = [[0], []]
    for _ in range(9):
        many = [many] * 10
    assert link.encoder.encode(("method", (many,), {}, 0))[:1] != MARK
    itself: Any = []
    itself.append(itself)
    (got,) = link.send(("method", (itself,), {}, 0))[1]
    for _ in range(20):
        (got,) = got
    assert got[0] is got
    link.arrives(step(5))


def test_a_step_within_a_steps_dict_of_names_leaves_its_keys_alone(link: Link) -> None:
    for inner in ({"b": 1}, {"b": [1]}, {"c": {"d": 1}}):
        within = Scheduled([], None, inner)
        message = "method", (Scheduled([], None, {"a": within, "e": within}),), {}, 0
        record = link.encoder.encode(message)
        assert record[:1] == MARK
        assert exactly(link.receive(record)) == exactly(message)


def test_what_either_end_changes_afterwards_stays_its_own(link: Link) -> None:
    message = step(5)
    for _ in range(3):
        got = link.send(message)
        assert exactly(got) == exactly(message)
        got[1][0].scheduled_cached_reqs.req_ids.clear()
        got[1][0].num_scheduled_tokens.clear()
    message[1][0].scheduled_cached_reqs.req_ids[2] = "another"
    link.arrives(message)


def test_large_arrays_among_the_fields_go_out_of_band(link: Link) -> None:
    array = np.arange(50_000)
    record = link.encoder.encode((Status.SUCCESS, Output(["a"], {"a": 0}, [[5]], array)))
    assert isinstance(record, tuple)
    status, got = link.receive([record[0], bytearray(record[1])])
    assert (status, got.sampled_token_ids) == (Status.SUCCESS, [[5]])
    np.testing.assert_array_equal(got.logprobs, array)


class Explodes:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_a_field_that_cannot_be_unpickled_costs_only_its_own_step(link: Link) -> None:
    bad = step(5)
    bad[1][0].connector_metadata = Explodes()
    with pytest.raises(ZeroDivisionError):
        link.send(bad)
    link.arrives(step(5))


def test_a_lost_step_is_noticed_and_the_next_epoch_is_understood(link: Link) -> None:
    link.send(step(5))
    link.encoder.encode(step(6))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="lost one"):
            link.send(step(6))
    link.encoder.forget()
    link.arrives(step(6))


def test_an_epoch_ends_by_itself(link: Link) -> None:
    for number in range(5000):
        got = link.send(step(4, number * 4))
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
        (Renamed, "Renamed has no req_ids"),
        (Plain, "Plain is no dataclass"),
        (Special, "Special is pickled in a way of its own"),
    ],
)
def test_classes_that_differ_are_found_at_the_start(kind: type, problem: str) -> None:
    assert CLASSES.problem() == ""
    assert StepClasses(Scheduled, New, kind, Output, Status).problem() == problem


def test_another_layout_is_refused() -> None:
    @dataclass
    class Longer(Output):
        more: int = 0

    record: Any = Encoder(StepClasses(Scheduled, New, Cached, Longer, Status)).encode(step(2))
    for decoder, problem in ((Decoder(CLASSES), "other fields"), (Decoder(), "field by field")):
        with pytest.raises(ProtocolError, match=problem):
            decoder.decode(record)


def test_a_refused_layout_takes_no_reference_of_a_class() -> None:
    """A failure once gave back a reference to the class that it had not taken."""

    class Counted:
        pass

    before = sys.getrefcount(Counted)
    for _ in range(20):
        with pytest.raises(TypeError):
            Packer(((Counted, ["no tuple"], b""),), (), 1)  # pyright: ignore[reportArgumentType]
    assert sys.getrefcount(Counted) == before


class Forgetful:
    """Has the writer forget its names when it is collected."""

    def __init__(self, encoder: Encoder) -> None:
        self.itself, self.forget = self, encoder.forget

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # in the midst of a step it is refused
            self.forget()


def test_what_is_collected_in_the_midst_of_a_step_cannot_change_it(link: Link) -> None:
    """Up to Python 3.11 a list that is made may run any finalizer."""
    before = gc.get_threshold()
    try:
        for number in range(200):
            message = step(20, number // 3)
            gc.set_threshold(0)
            Forgetful(link.encoder)
            gc.set_threshold(1 + number % 7)
            record = link.encoder.encode(message)
            gc.set_threshold(*before)
            assert exactly(link.receive(record)) == exactly(message)
    finally:
        gc.set_threshold(*before)
