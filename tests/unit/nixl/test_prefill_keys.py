"""Keys of prefills: each releases its own prefill once, whenever it comes; all else is harmless."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.prefill.keys import (
    MAX_EARLY,
    MAX_RELEASES,
    PrefillKeys,
    prefill_key_of,
    releases_of,
)
from vllm_commext.nixl.prefill.leases import LeaseLedger

KEYS = [f"{number:032x}" for number in range(4)]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.sampled_from(["add", "end", "release"]), st.integers(0, 3))))
def test_what_is_unwanted_is_what_was_released_and_has_not_ended(
    steps: list[tuple[str, int]],
) -> None:
    keys, early, running, unwanted = PrefillKeys(), set[int](), set[int](), set[int]()
    for step, number in steps:
        name = f"r{number}"
        if step == "add" and number not in running:
            keys.add(KEYS[number], name)
            running.add(number)
            unwanted |= {number} & early
            early.discard(number)
        elif step == "end":
            keys.forget(name)
            running.discard(number)
            unwanted.discard(number)
        elif step == "release":
            known = number in running and number not in unwanted
            assert keys.release(KEYS[number]) == (name if known else "")
            (unwanted if known else early).add(number)
        assert keys.unwanted == {f"r{one}" for one in unwanted}


def test_early_releases_are_bounded_and_what_is_no_key_is_not_kept() -> None:
    keys = PrefillKeys()
    for number in range(MAX_EARLY + 5):
        keys.release(f"{number:032x}")
    assert keys.release("") == ""
    for number in range(10):
        keys.add(f"{number:032x}", f"r{number}")
    assert keys.unwanted == {f"r{number}" for number in range(5, 10)}


def test_a_second_prefill_with_a_key_is_not_released_by_it() -> None:
    keys = PrefillKeys()
    keys.add(KEYS[0], "first")
    keys.add(KEYS[0], "second")
    keys.forget("second")
    assert keys.release(KEYS[0]) == "first"
    assert keys.release(KEYS[0]) == ""


@given(json_values)
def test_any_value_is_read(value: Any) -> None:
    assert prefill_key_of({"prefill_key": value}) in ("", value)
    named = releases_of({"release": value})
    assert len(named) == (len(value) if isinstance(value, list) else 0)
    assert all(one == "" or one in value for one in named)


@pytest.mark.parametrize("params", [None, {}, {"release": None}])
def test_none_is_named(params: Any) -> None:
    assert (prefill_key_of(params), releases_of(params)) == ("", [])


def test_a_request_names_so_many_at_most() -> None:
    assert len(releases_of({"release": KEYS * MAX_RELEASES})) == MAX_RELEASES


def test_a_dropped_lease_ends_once_whoever_has_released_it() -> None:
    ledger = LeaseLedger()
    assert not ledger.drop("r")
    ledger.hold("r", 0.0, 10.0)
    ledger.release("r", "d0", 2, 1.0)
    assert ledger.drop("r")
    assert not ledger.drop("r")
    assert len(ledger) == 0
    assert ledger.expire(11.0, 60.0) == {}
