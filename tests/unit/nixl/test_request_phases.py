"""The phases of requests and the moves between them are those that the documentation draws, and
what follows from them."""

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.load_states import known
from vllm_commext.nixl.decode.load_state import MOVES as LOAD_MOVES
from vllm_commext.nixl.decode.load_state import LoadPhase, TokenPhase
from vllm_commext.nixl.prefill.prefill_state import MOVES as PREFILL_MOVES
from vllm_commext.nixl.prefill.prefill_state import PrefillPhase, PrefillState

DOCS = Path(__file__).parents[3] / "docs" / "design" / "requests.md"
TABLES: list[list[list[str]]] = [
    [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", DOCS.read_text(), re.MULTILINE)
]
REQUEST: Any = SimpleNamespace(request_id="r", num_prompt_tokens=10)
KINDS: Any = [LoadPhase, TokenPhase, PrefillPhase]


@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda one: KINDS[one].__name__)
def test_each_phase_and_each_pair_of_phases_is_as_the_tables_say(number: int) -> None:
    kind, moves = KINDS[number], LOAD_MOVES | PREFILL_MOVES
    meanings, drawn = TABLES[2 * number : 2 * number + 2]
    assert [[phase.value, phase.meaning] for phase in kind] == meanings
    pairs = [(old.value, new.value) for old in kind for new in kind if new in moves[old]]
    assert sorted(pairs) == sorted((old, new) for old, new, _ in drawn)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_record_goes_along_the_drawn_ways_alone_and_comes_to_an_end(
    kind: Any, data: st.DataObject
) -> None:
    """The oracle walks through the documentation's tables."""
    drawn = defaultdict[str, set[str]](set)
    for old, new, _ in TABLES[2 * KINDS.index(kind) + 1]:
        drawn[old].add(new)
    state: Any = PrefillState(REQUEST) if kind is PrefillPhase else known("r")
    state.phase = LoadPhase.ASKED if kind is LoadPhase else state.phase
    expected, num_moves = next(iter(kind)).value, 0
    for phase in data.draw(st.lists(st.sampled_from(list(kind)), max_size=30)):
        may = phase.value in drawn[expected]
        assert state.move(phase) == may
        expected, num_moves = (phase.value, num_moves + 1) if may else (expected, num_moves)
        assert (state.token_phase if kind is TokenPhase else state.phase).value == expected
    assert num_moves < len(kind)  # no way leads back


@pytest.mark.parametrize(
    ("phase", "is_told", "then"),
    [
        (PrefillPhase.COMPUTED, True, PrefillPhase.UNWANTED),
        (PrefillPhase.UNWANTED, False, PrefillPhase.UNWANTED),
        (PrefillPhase.HELD, True, PrefillPhase.RELEASED),
        (PrefillPhase.RELEASED, False, PrefillPhase.RELEASED),
        (PrefillPhase.FREE, False, PrefillPhase.FREE),
    ],
)
def test_who_renounces_a_prompt_tells_the_workers_once(
    phase: PrefillPhase, is_told: bool, then: PrefillPhase
) -> None:
    state = PrefillState(REQUEST, phase)
    assert (state.renounce(), state.phase) == (is_told, then)
    assert not state.renounce()
