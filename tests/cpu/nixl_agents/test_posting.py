"""Reads that NIXL gets in pieces."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.nixl_agents.harness import HOST, wait_until
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.layout import strided_row
from vllm_commext.nixl.geometry.plan import Pairs
from vllm_commext.nixl.transport import posting
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.posting import Posting, pieces_of_read

pytestmark = pytest.mark.timeout(300)
NUM_BLOCKS = 100
BLOCK_BYTES = 64

MakeEngine = Callable[..., Any]


def test_the_threads_waits_end_when_they_should(make_engine: MakeEngine) -> None:
    """As far as Linux says; a wait of 50 us lasts twice as long else."""
    slack = Path(f"/proc/{make_engine('d', seed=2).thread._thread.native_id}/timerslack_ns")
    wait_until(lambda: int(slack.read_text()) == 1000, "the thread to begin")


class Looped:
    """An agent that reads its own memory."""

    def __init__(self) -> None:
        self.agent = NixlAgent(ConnectorConfig(HOST, 1))
        self.source = (1 + np.arange(NUM_BLOCKS * BLOCK_BYTES) % 251).astype(np.uint8)
        self.target = np.zeros_like(self.source)
        both = [(one.ctypes.data, one.nbytes) for one in (self.source, self.target)]
        self.agent.register(both, "DRAM", 0)
        self.lists = [
            self.agent.prepare(name, self._rows(memory), "DRAM")
            for name, memory in (("", self.target), (self.agent.name, self.source))
        ]

    @staticmethod
    def _rows(memory: Any) -> Any:
        return strided_row(address=memory.ctypes.data, num_bytes=BLOCK_BYTES, count=NUM_BLOCKS)

    def pieces(self, *numbers: int) -> Iterator[Any]:
        blocks = np.array(numbers, dtype=np.int32)
        pairs = Pairs(blocks, blocks, BLOCK_BYTES * len(blocks))
        return pieces_of_read(self.agent, *self.lists, pairs)

    def arrived(self) -> list[int]:
        same_bytes = (self.source == self.target).reshape(NUM_BLOCKS, -1).all(axis=1)
        return np.flatnonzero(same_bytes).tolist()

    def close(self) -> None:
        for prepared in self.lists:
            self.agent.release_list(prepared)
        self.agent.close()


@pytest.fixture
def looped() -> Iterator[Looped]:
    made = Looped()
    yield made
    made.close()


def end_of(under_way: Posting) -> str:
    found: list[str] = []

    def look() -> bool:
        said = under_way.look()
        found.extend([] if said is None else [said])
        return said is not None

    wait_until(look, "the end of the pieces")
    return found[0]


def test_a_first_piece_that_cannot_be_made_leaves_nothing_under_way(looped: Looped) -> None:
    with pytest.raises(Exception, match="NIXL_ERR"):
        Posting(looped.agent, looped.pieces(5, NUM_BLOCKS))
    assert looped.arrived() == []


def test_a_later_piece_that_cannot_be_made_is_told_after_the_others_end(
    looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "MAX_DESCRIPTORS", 2)
    under_way = Posting(looped.agent, looped.pieces(5, 9, 11, 13, NUM_BLOCKS, 20))
    assert "NIXL_ERR" in end_of(under_way)
    assert looped.arrived() == [5, 9, 11, 13]


def test_all_pieces_end_well(looped: Looped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "MAX_DESCRIPTORS", 3)
    numbers = [*range(1, 60), 70]
    assert end_of(Posting(looped.agent, looped.pieces(*numbers))) == ""
    assert looped.arrived() == numbers
    assert end_of(Posting(looped.agent, [])) == ""
