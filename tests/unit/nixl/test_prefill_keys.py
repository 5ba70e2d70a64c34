"""Keys of prefills: each releases its own prefill once, whenever it comes; all else is harmless."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_commext.nixl.prefill.prefill_state import (
    MAX_EARLY,
    MAX_RELEASES,
    PrefillKeys,
    PrefillPhase,
    PrefillState,
    prefill_key_of,
    releases_of,
)

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
    keys, early, running = PrefillKeys(), set[int](), dict[int, PrefillState]()
    unwanted = set[int]()
    for step, number in steps:
        if step == "add" and number not in running:
            running[number] = state()
            keys.add(KEYS[number], running[number])
            unwanted |= {number} & early
            early.discard(number)
        elif step == "end" and number in running:
            keys.forget(running.pop(number))
            unwanted.discard(number)
        elif step == "release":
            known = number in running and number not in unwanted
            found = keys.release(KEYS[number])
            assert found is (running[number] if known else None)
            if found is not None:
                found.renounce()
            (unwanted if known else early).add(number)
        wanted = {one for one, state in running.items() if state.phase is PrefillPhase.COMPUTED}
        assert wanted == running.keys() - unwanted


def state() -> PrefillState:
    return PrefillState(SimpleNamespace())  # pyright: ignore[reportArgumentType]


def test_early_releases_are_bounded_and_what_is_no_key_is_not_kept() -> None:
    keys = PrefillKeys()
    for number in range(MAX_EARLY + 5):
        keys.release(f"{number:032x}")
    assert keys.release("") is None
    states = [state() for _ in range(10)]
    for number, one in enumerate(states):
        keys.add(f"{number:032x}", one)
    phases = [PrefillPhase.COMPUTED] * 5 + [PrefillPhase.UNWANTED] * 5
    assert [one.phase for one in states] == phases


def test_a_second_prefill_with_a_key_is_not_released_by_it() -> None:
    keys, first, second = PrefillKeys(), state(), state()
    keys.add(KEYS[0], first)
    keys.add(KEYS[0], second)
    keys.forget(second)
    assert keys.release(KEYS[0]) is first
    assert keys.release(KEYS[0]) is None


@given(json_values)
def test_any_value_is_read(value: Any) -> None:
    assert prefill_key_of({"prefill_key": value}) in ("", value)
    named = releases_of({"release": value})
    assert len(named) == (len(value) if isinstance(value, list) else 0)
    assert all(one == "" or one in value for one in named)


def test_a_request_names_so_many_at_most() -> None:
    assert len(releases_of({"release": KEYS * MAX_RELEASES})) == MAX_RELEASES
