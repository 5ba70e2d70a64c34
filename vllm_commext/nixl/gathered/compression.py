"""Parts of reads that are compressed in the peer's slot, and here again what they were; see
``exponents``.

In between a part lies in the *scratch*, memory of a slot's size that one part uses at a time. What
is to be done goes on a little at each look, for the thread that looks has more to do.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence

import torch

from vllm_commext.nixl.gathered import exponents
from vllm_commext.nixl.gathered.staging import Gathering
from vllm_commext.nixl.geometry.plan import Int64Array
from vllm_commext.nixl.mapped.gather import Batch
from vllm_commext.nixl.transport.posting import Posting

LOOK_SECONDS = 10e-3
"""After which a look ends, at the end of a step."""
Steps = Generator[bool, None, int]
"""Each says whether there is something to wait for; at the end the level, 0 for what is as it was.
"""


class Stepwise:
    """What is under way step by step, looked at as a ``Posting`` is.

    Attributes: ``level``: of the part, at the end.
    """

    num_merged = 0

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.level = 0

    def look(self) -> str | None:
        """None while it is under way; then what went wrong, "" where nothing did."""
        end = time.monotonic() + LOOK_SECONDS
        try:
            while time.monotonic() < end and not next(self._steps):
                pass
        except StopIteration as ended:
            self.level = ended.value
            return ""
        except Exception as error:  # noqa: BLE001 of torch, or of what a peer has sent
            return str(error) or type(error).__name__
        return None


def compress(
    gathering: Gathering,
    sources: Int64Array,
    begins: Int64Array,
    lengths: Int64Array,
    target: torch.Tensor,
) -> Steps:
    """Gather pieces into a slot, compressed where that makes them shorter.

    Args:
        sources: addresses of the pieces.
        begins: where they belong in a slot, and where the last one ends.
        lengths: of the pieces.
        target: the slot, ``[n]`` uint8.
    """
    scratch, num_bytes = gathering.scratch, int(begins[-1])
    assert scratch is not None  # the caller has asked
    yield from scratch.taken()
    try:
        yield from _copied(gathering.copy(sources, scratch.address + begins[:-1], lengths))
        level = 0
        for found in _on_device(gathering, exponents.encode(scratch.memory, target, num_bytes)):
            level = found
            yield False
        if not level:
            with gathering.copies.stream():
                target[:num_bytes].copy_(scratch.memory[:num_bytes])
        return level
    finally:
        scratch.give_back()


def decompress(
    gathering: Gathering,
    source: torch.Tensor,
    level: int,
    num_bytes: int,
    batches: Sequence[Batch],
) -> Steps:
    """Spread out a compressed part.

    Args:
        source: this worker's slot that it was read into, ``[n]`` uint8.
        level: of its compression.
        num_bytes: of it, as it was.
        batches: copy its pieces from there to where they belong.
    """
    scratch = gathering.scratch
    assert scratch is not None  # it has asked for compressed parts
    yield from scratch.taken()
    try:
        steps = exponents.decode(source, scratch.memory, num_bytes, level)
        for _ in _on_device(gathering, steps):
            yield False
        yield from _copied(gathering.start(batches, scratch.address))
        return level
    finally:
        scratch.give_back()


def _copied(posting: Posting) -> Generator[bool]:
    while (error := posting.look()) is None:
        yield True
    if error:
        raise RuntimeError(error)


def _on_device(gathering: Gathering, steps: Iterator[int]) -> Iterator[int]:
    """What the steps yield; each is on the stream of the copies, and done before the next one."""
    while True:
        with gathering.copies.stream():
            value = next(steps, None)
        if value is None:
            return
        yield value
