"""Blocks of late loads stay out of use until every worker has settled; a small pool stands in for
vLLM's, which the contract layer uses."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.load_states import known
from vllm_commext.nixl.decode.load_state import Quarantine


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0


@dataclass
class Pool:
    """Reference counts; a block is free where nobody refers to it."""

    blocks: list[Block] = field(default_factory=lambda: [Block(number) for number in range(12)])

    def take(self, count: int) -> list[Block]:
        free = [block for block in self.blocks if block.ref_cnt == 0][:count]
        self.touch(free)
        return free

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    @property
    def num_free(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)


def test_without_a_pool_a_late_load_goes_on() -> None:
    quarantine = Quarantine(1)
    blocks: Any = Pool().take(2)
    quarantine.begin(known("r", blocks=blocks))
    assert quarantine.note_late({"r"}) == []
    assert len(quarantine) == 0


@pytest.mark.parametrize("num_workers", [1, 3])
@given(data=st.data())
@settings(max_examples=30)
def test_random_histories_give_every_block_back(num_workers: int, data: st.DataObject) -> None:
    pool: Any = Pool()
    quarantine = Quarantine(num_workers)
    quarantine.bind(pool)
    loading: dict[str, list[Block]] = {}
    unsettled: dict[str, tuple[int, list[Block]]] = {}
    for number in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["load", "end", "late", "settle"]))
        if step == "load" and pool.num_free >= 2:
            blocks: Any = pool.take(2)
            loading[f"r{number}"] = blocks
            quarantine.begin(known(f"r{number}", blocks=blocks))
        elif step in ("end", "late") and loading:
            name = data.draw(st.sampled_from(sorted(loading)))
            blocks = loading.pop(name)
            if step == "late":
                assert quarantine.note_late([name]) == [name]
                unsettled[name] = (num_workers, blocks)
            quarantine.end(name)
            pool.free_blocks(blocks)
        elif step == "settle" and unsettled:
            name = data.draw(st.sampled_from(sorted(unsettled)))
            left, blocks = unsettled.pop(name)
            quarantine.note_settled({name: 1})
            if left > 1:
                unsettled[name] = (left - 1, blocks)
        kept = {block.block_id for _, blocks in unsettled.values() for block in blocks}
        used = {block.block_id for blocks in loading.values() for block in blocks}
        assert len(quarantine) == len(kept)
        assert {block.block_id for block in pool.blocks if block.ref_cnt} == kept | used
