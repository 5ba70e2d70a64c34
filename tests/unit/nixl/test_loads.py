"""Loads in several parts: each ends once, when its last part has, whatever failed or was given up
before."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_commext.errors import ProtocolError
from vllm_commext.nixl.decode.loads import Ended, Failure, LoadBook, Part
from vllm_commext.nixl.requests import Load, RemoteRequest

REMOTE = RemoteRequest("p", "", "h", 5600, 4, "there", ((1,),), 16)
FIRST = Failure("transfer", ProtocolError("first"))
SECOND = Failure("expired", ProtocolError("second"))
LATE = Failure("timeout", ProtocolError("late"))


def load_named(request_id: str) -> Load:
    return Load(request_id, REMOTE)


def parts_of(load: Load, count: int) -> list[Part]:
    return [Part(load, REMOTE, source, 1, reads=True) for source in range(count)]


@pytest.fixture
def book() -> LoadBook:
    return LoadBook()


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_load_ends_with_its_last_part(book: LoadBook, num_parts: int) -> None:
    load = load_named("r")
    book.begin(load, num_parts)
    *others, last = parts_of(load, num_parts)
    for part in others:
        assert book.close(part) is None
        assert not book.has_failed(load)
        assert len(book) == 1
    assert book.close(last) == Ended(failure=None, given_up=False)
    assert len(book) == 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_failure_of_one_part_waits_for_the_others(book: LoadBook, failing: int) -> None:
    load = load_named("r")
    book.begin(load, 3)
    for number, part in enumerate(parts_of(load, 3)[:2]):
        assert book.close(part, FIRST if number == failing else None) is None
        assert book.has_failed(load) == (number >= failing)
    last = parts_of(load, 3)[2]
    assert book.close(last, FIRST if failing == 2 else None) == Ended(FIRST, given_up=False)
    assert book.has_failed(load)


def test_the_first_failure_is_told(book: LoadBook) -> None:
    load = load_named("r")
    book.begin(load, 2)
    one, other = parts_of(load, 2)
    book.close(one, FIRST)
    assert book.close(other, SECOND) == Ended(FIRST, given_up=False)


def test_a_load_given_up_is_settled_by_its_last_part(book: LoadBook) -> None:
    load = load_named("r")
    book.begin(load, 3)
    first, second, third = parts_of(load, 3)
    book.close(first)
    assert book.give_up("r", LATE) is load
    assert book.has_failed(load)
    assert book.close(second, FIRST) is None
    assert book.close(third) == Ended(LATE, given_up=True)
    assert book.give_up("r", LATE) is None


def test_a_failure_before_giving_up_stays_the_reason(book: LoadBook) -> None:
    load = load_named("r")
    book.begin(load, 2)
    one, other = parts_of(load, 2)
    book.close(one, FIRST)
    assert book.give_up("r", LATE) is load
    assert book.close(other) == Ended(FIRST, given_up=True)


def test_what_has_ended_or_never_was_cannot_be_given_up(book: LoadBook) -> None:
    load = load_named("r")
    book.begin(load, 1)
    book.close(parts_of(load, 1)[0])
    assert book.give_up("r", LATE) is None
    assert book.give_up("other", LATE) is None
    assert book.has_failed(load)


def test_an_id_may_be_used_again(book: LoadBook) -> None:
    load = load_named("r")
    for failure in (FIRST, None):
        book.begin(load, 1)
        assert not book.has_failed(load)
        assert book.close(parts_of(load, 1)[0], failure) == Ended(failure, given_up=False)


@dataclass
class Expected:
    """What a load should have come to, kept apart from the book."""

    parts: list[Part]
    failures: list[Failure] = field(default_factory=list)
    given_up: bool = False


@given(st.data())
@settings(max_examples=100)
def test_random_histories_end_every_load_once(data: st.DataObject) -> None:
    book, open_loads, ended = LoadBook(), dict[str, Expected](), dict[str, Ended]()
    for number in range(data.draw(st.integers(1, 4))):
        load = load_named(f"r{number}")
        expected = Expected(parts_of(load, data.draw(st.integers(1, 4))))
        open_loads[load.request_id] = expected
        book.begin(load, len(expected.parts))
    while open_loads:
        name = data.draw(st.sampled_from(sorted(open_loads)))
        expected = open_loads[name]
        if data.draw(st.sampled_from(["close", "close", "give up"])) == "give up":
            assert book.give_up(name, LATE) is expected.parts[0].load
            expected.failures.append(LATE)
            expected.given_up = True
            continue
        failure = data.draw(st.sampled_from([None, FIRST, SECOND]))
        expected.failures += [failure] if failure else []
        part = expected.parts.pop(data.draw(st.integers(0, len(expected.parts) - 1)))
        outcome = book.close(part, failure)
        assert (outcome is None) == bool(expected.parts)
        if outcome is not None:
            assert name not in ended
            ended[name] = outcome
            reason = expected.failures[0] if expected.failures else None
            assert outcome == Ended(reason, expected.given_up)
            del open_loads[name]
        assert len(book) == len(open_loads)
        for one in open_loads.values():
            assert book.has_failed(one.parts[0].load) == bool(one.failures)
