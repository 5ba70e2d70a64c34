"""Blocks copied to the host and back: those that are named, and no others."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from vllm_commext.nixl.cache_memory import HostBuffer  # noqa: E402 torch may be missing

NUM_BLOCKS = 6


def two_layers_of_one_allocation() -> dict[str, Any]:
    """A layer whose blocks are single rows and one whose blocks are two, in one storage."""
    memory = torch.arange(NUM_BLOCKS * 2 * 8, dtype=torch.float32)
    half = NUM_BLOCKS * 8
    return {
        "a": memory[:half].view(NUM_BLOCKS, 1, 4, 2),
        "b": memory[half:].view(NUM_BLOCKS * 2, 1, 2, 2),
    }


def test_views_have_the_form_of_the_caches_and_memory_of_their_own() -> None:
    caches = two_layers_of_one_allocation()
    host = HostBuffer(caches, NUM_BLOCKS, [["a", "b"]])
    for name, cache in caches.items():
        view = host.views[name]
        assert (view.shape, view.stride(), view.dtype) == (cache.shape, cache.stride(), cache.dtype)
        assert view.data_ptr() != cache.data_ptr()
    distance = host.views["b"].data_ptr() - host.views["a"].data_ptr()
    assert distance == caches["b"].data_ptr() - caches["a"].data_ptr()


def test_named_blocks_go_out_and_come_back() -> None:
    caches = two_layers_of_one_allocation()
    before = {name: cache.clone() for name, cache in caches.items()}
    host = HostBuffer(caches, NUM_BLOCKS, [["a"], ["b"]])
    host.save([[4, 1], [2]])
    assert torch.equal(host.views["a"][[1, 4]], before["a"][[1, 4]])
    assert torch.equal(host.views["b"][4:6], before["b"][4:6])
    assert host.views["a"][[0, 2, 3, 5]].count_nonzero() == 0
    assert host.views["b"][[0, 1, 2, 3, *range(6, 12)]].count_nonzero() == 0
    for cache in caches.values():
        cache.zero_()
    host.restore([[1], [2]])
    assert torch.equal(caches["a"][1], before["a"][1])
    assert torch.equal(caches["b"][4:6], before["b"][4:6])
    assert caches["a"][[0, 2, 3, 4, 5]].count_nonzero() == 0
