"""Which block ids of a row a decode engine asks for and believes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_commext.nixl.geometry.layout import FULL, WINDOW, Group
from vllm_commext.nixl.stream.cursor import Cursor, Wanted
from vllm_commext.nixl.stream.progress import PIECE_IDS, Header, entries_of, regions_of

NONCE, LATER = 77, 78
BLOCK = 4
NUM_TOKENS = 600 * BLOCK


def cursor_over(*groups: Group) -> Cursor:
    link: Any = SimpleNamespace(plan=SimpleNamespace(remote=SimpleNamespace(groups=[*groups])))
    sizes = SimpleNamespace(num_tokens=NUM_TOKENS)
    part: Any = SimpleNamespace(load=sizes, remote=sizes)
    has_rest = all(group.kind == FULL for group in groups)
    return Cursor(part, link, NONCE, regions_of(groups, NUM_TOKENS), BLOCK, 0, has_rest)


@pytest.fixture(name="cursor")
def _cursor() -> Cursor:
    return cursor_over(Group(FULL, BLOCK))


def say(cursor: Cursor, num_blocks: int, *, is_whole: bool = False) -> None:
    """The row's header says that so many blocks are computed."""
    cursor.note_progress(Header(NONCE, cursor.nonce, num_blocks * BLOCK, is_whole))


def entries(first: int, num_blocks: int, nonce: int = NONCE) -> Any:
    """What pieces from a block on hold; its id is its position."""
    listed = entries_of(nonce, range(first, num_blocks))
    size = -(-(num_blocks - first) // PIECE_IDS) * PIECE_IDS
    return np.concatenate([listed, np.zeros(size - len(listed), dtype=np.uint64)])


def test_a_look_asks_for_what_the_next_chunk_is_likely_to_need(cursor: Cursor) -> None:
    assert cursor.wanted() == [Wanted(0, 0, 1)]
    say(cursor, 200)
    cursor.take(cursor.wanted(), entries(0, 64))
    assert not cursor.is_known
    assert cursor.wanted() == [Wanted(0, 1, 3)]
    cursor.take(cursor.wanted(), entries(64, 200))
    assert cursor.is_known
    cursor.note_read()
    assert cursor.wanted() == [Wanted(0, 3, 4)]


def test_ids_that_were_not_there_yet_are_asked_for_again(cursor: Cursor) -> None:
    say(cursor, 70)
    wanted = cursor.wanted()
    cursor.take(wanted, entries(0, 65))
    assert not cursor.is_known
    assert cursor.ids[0].tolist() == list(range(65))
    cursor.take(wanted, entries(0, 3))
    assert cursor.ids[0].tolist() == list(range(65))
    cursor.take(cursor.wanted(), entries(64, 70))
    assert cursor.is_known


def test_ids_of_a_prompt_that_has_begun_again_are_not_taken_for_others(cursor: Cursor) -> None:
    say(cursor, 100)
    cursor.take(cursor.wanted(), entries(0, 100))
    say(cursor, 200)
    wanted = cursor.wanted()
    assert wanted == [Wanted(0, 1, 3)]
    cursor.start_again(LATER)
    cursor.take(wanted, entries(64, 200, LATER))
    assert cursor.ids[0].tolist() == []
    say(cursor, 100)
    cursor.take(cursor.wanted(), entries(0, 100))
    assert cursor.ids[0].tolist() == []


def test_a_rest_is_asked_for_as_soon_as_the_prompt_is_computed() -> None:
    cursor = cursor_over(Group(FULL, BLOCK), Group(WINDOW, BLOCK))
    say(cursor, 600)
    cursor.take(cursor.wanted(), entries(0, 600))
    cursor.note_read()
    assert cursor.wanted() == [Wanted(1, 0, 1)]
    cursor.take(cursor.wanted(), np.zeros(PIECE_IDS, dtype=np.uint64))
    say(cursor, 600, is_whole=True)
    assert not cursor.is_known
    listed = entries_of(NONCE, [70, *range(70)])
    cursor.take(cursor.wanted(), listed[:PIECE_IDS])
    assert cursor.wanted() == [Wanted(1, 1, 1)]
    cursor.take(cursor.wanted(), np.concatenate([listed[PIECE_IDS:], listed[:57]]))
    assert cursor.is_known
