"""Descriptors that NIXL moves for a request on fragmented pools.

Our order of the block pairs ascends in the prefill engine's blocks, vLLM's is that of the request.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from kv_connector.churn import Service
from kv_connector.counting import Counter
from kv_connector.samples import OURS, VLLM, Sample
from kv_connector.shapes import BLOCK_SIZE, Shape, kv_cache_config, make_caches, our_layout
from vllm_commext.nixl.geometry.plan import Blocks
from vllm_commext.nixl.geometry.topology import Rank

UNIT = "descriptors for 100 blocks"


def case(num_turns: int, *, caching: bool) -> str:
    """A pool that was used up so many times."""
    return f"pool used {num_turns} times, prefix caching {'on' if caching else 'off'}"


def measure_blocks(
    model: Path, num_blocks: int, turns: Sequence[int], num_requests: int, seeds: Sequence[int]
) -> list[Sample]:
    """Over ``num_requests`` requests, after the pools were used up ``turns`` times."""
    shape = Shape(1, num_blocks, head_size=1)
    caches = make_caches(shape), make_caches(shape)
    layouts = our_layout(shape, caches[0], Rank(1, 0)), our_layout(shape, caches[1], Rank(1, 0))
    counter = Counter(model, kv_cache_config(shape), caches, layouts)
    samples: list[Sample] = []
    for caching, seed in itertools.product((True, False), seeds):
        service = Service(num_blocks, seed, caching=caching)
        samples += _one_service(counter, service, num_blocks, turns, num_requests, caching=caching)
    return samples


def _one_service(
    counter: Counter,
    service: Service,
    num_blocks: int,
    turns: Sequence[int],
    num_requests: int,
    *,
    caching: bool,
) -> Iterator[Sample]:
    requests, used = service.requests(), 0
    for turn in turns:
        while used < turn * num_blocks:
            used += len(next(requests)[0])
        found = list(itertools.islice(requests, num_requests))
        used += sum(len(local) for local, _ in found)
        num_found = sum(len(local) for local, _ in found)
        ours = sum(_ours(counter, *one) for one in found)
        vllm = sum(counter.vllm([local], [remote]) for local, remote in found)
        name = case(turn, caching=caching)
        yield Sample(name, UNIT, OURS, 100 * ours / num_found)
        yield Sample(name, UNIT, VLLM, 100 * vllm / num_found)


def _ours(counter: Counter, local: list[int], remote: list[int]) -> int:
    return counter.ours([Blocks(0, local)], [remote], BLOCK_SIZE * len(local))
