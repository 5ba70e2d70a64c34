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
from vllm_commext.nixl.decode.load_state import LoadPhase, LoadState, Source, TokenPhase
from vllm_commext.nixl.prefill.prefill_state import MOVES as PREFILL_MOVES
from vllm_commext.nixl.prefill.prefill_state import PrefillPhase, PrefillState, Stream

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


@pytest.mark.parametrize("token_phase", TokenPhase)
@pytest.mark.parametrize("is_void", [False, True])
@pytest.mark.parametrize("source", Source)
def test_a_failed_load_is_computed_here_where_nothing_else_is_left(
    source: Source, is_void: bool, token_phase: TokenPhase
) -> None:
    """Its client has a token of the answer, what was computed counts no more, or nobody has been
    told that its blocks are elsewhere."""
    state = LoadState(REQUEST, source, token_phase=token_phase, is_void=is_void)
    reasons = {source == Source.REUSED, is_void, token_phase == TokenPhase.SENT}
    assert state.must_compute == (True in reasons)


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


@pytest.mark.parametrize("slot", [-1, 0, 5])
@pytest.mark.parametrize("row", [None, 0, 3])
def test_readers_are_told_of_progress_in_a_row_with_a_fence(row: int | None, slot: int) -> None:
    stream = None if row is None else Stream("k", row)
    state = PrefillState(REQUEST, slot=slot, stream=stream)
    assert state.row == (row if row is not None and slot >= 0 else -1)
