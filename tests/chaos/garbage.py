"""Bytes that nobody should have to read: random ones, and valid ones altered.  Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.messages import KeepAlive, Released

MAX_RANDOM_BYTES = 300


def requests() -> list[bytes]:
    """Valid frames of the side channel to start from."""
    frames = (
        wire.DescribeRequest(engine_id="prefill-0", tp_rank=0),
        wire.DescribeRequest(engine_id="another", tp_rank=-1),
        wire.DescribeRequest(engine_id="prefill-0", tp_rank=1 << 40, version=1),
        wire.DescribeRequest(engine_id="p", tp_rank=0, magic="nixl"),
        wire.Refused(reason="?"),
    )
    return [wire.encode(frame) for frame in frames]


def notifications() -> list[bytes]:
    """Valid notifications to start from, of requests that nobody has made."""
    frames = (
        Released(request_id="cmpl-1", consumer="decode-0/0", num_consumers=1),
        Released(request_id="", consumer="", num_consumers=-1),
        Released(request_id="r" * 1000, consumer="c" * 1000, num_consumers=1 << 60),
        Released(request_id="cmpl-2", consumer="d/1", num_consumers=2, version=99),
        KeepAlive(consumer="d/0", request_ids=["cmpl-1", ""]),
        KeepAlive(consumer="", request_ids=["r"] * 500),
    )
    return [wire.encode(frame) for frame in frames]


def mutations(rng: random.Random, valid: Sequence[bytes], num_frames: int) -> Iterator[bytes]:
    """Frames, most of them malformed: random bytes, and valid frames with bytes altered, cut out,
    repeated or added."""
    for _ in range(num_frames):
        if rng.random() < 0.25:
            yield rng.randbytes(rng.randrange(MAX_RANDOM_BYTES))
            continue
        frame = bytearray(rng.choice(valid))
        for _ in range(rng.randrange(4)):
            _alter(rng, frame)
        yield bytes(frame)


def _alter(rng: random.Random, frame: bytearray) -> None:
    place = rng.randrange(len(frame) + 1)
    choice = rng.randrange(4)
    if choice == 0 and place < len(frame):
        frame[place] = rng.randrange(256)
    elif choice == 1:
        del frame[place : place + rng.randrange(1, 9)]
    elif choice == 2:
        frame[place:place] = rng.randbytes(rng.randrange(1, 9))
    else:
        frame += frame[place : place + 64]
