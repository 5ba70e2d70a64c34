"""Garbage in bulk, against the real listener and a real agent: nothing may die and nothing grow.

    python -m tests.chaos.fuzzing --frames 1000000 --notifications 100000 --seed 1

prints what was sent, what was refused, and what the process holds more than after the first tenth.
Exit status: 0 where nothing has grown."""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import zmq

from tests.chaos.census import take_census
from tests.chaos.garbage import mutations, notifications, requests
from tests.kit.descriptions import description
from tests.kit.servers import CPU_ENVIRON, LOOPBACK, free_port
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.prefill.leases import LeaseManager
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import CompletionQueue, Hold
from vllm_commext.nixl.stream.progress import WorkerTables
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.connection import endpoint
from vllm_commext.nixl.wire.messages import Released
from vllm_commext.nixl.wire.seal import FrameSigner

ENGINE = "prefill-0"
WINDOW = 200
MAX_HEAP_BYTES = 8 << 20
SECONDS = 30.0
SECRET = b"a secret that is shared"
_numbers = itertools.count()
CONFIG = ConnectorConfig(
    side_channel_host=LOOPBACK, side_channel_port=1, backend_params={"num_threads": "1"}
)


class Growth(NamedTuple):
    """A run of garbage, of which ``num_refused`` were counted as not valid or as fitting nothing,
    and the growth since its first tenth: of the C heap, the interpreter's, and the rest."""

    num_sent: int
    num_refused: int
    heap_bytes: int
    num_blocks: int
    num_threads: int
    num_descriptors: int


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def held() -> tuple[int, int, int, int]:
    """Bytes of the C heap, blocks of the interpreter's, threads, descriptors."""
    gc.collect()
    census = take_census([os.getpid()])
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    heap = mallinfo()
    in_use = heap.uordblks + heap.hblkhd
    return in_use, sys.getallocatedblocks(), census.threads, census.descriptors


def _growth(num_sent: int, num_refused: int, before: Sequence[int], after: Sequence[int]) -> Growth:
    more = (late - early for early, late in zip(before, after, strict=True))
    return Growth(num_sent, num_refused, *more)


def is_steady(growth: Growth) -> bool:
    """Whether nothing is kept of what was sent: less than a block for four messages, and of the C
    heap no more than a few steps in which the pools of ZMQ and UCX grow."""
    return (
        growth.num_blocks < growth.num_sent // 4
        and growth.heap_bytes < MAX_HEAP_BYTES
        and growth.num_threads <= 0
        and growth.num_descriptors <= 0
    )


def fuzz_side_channel(num_frames: int, seed: int, secret: bytes | None = None) -> Growth:
    """Send garbage to a real listener; every frame must be answered, a valid request rightly."""
    valid = [*requests(), *(FrameSigner(secret).prove(frame) for frame in requests() if secret)]
    frames = mutations(random.Random(seed), valid, num_frames)
    port = free_port()
    server = SideChannelServer(
        ENGINE, "start-1", LOOPBACK, port, {0: description(ENGINE, b"m" * 1000)}, secret
    )
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
            dealer.connect(endpoint(LOOPBACK, port))
            before, num_sent = held(), 0
            while batch := list(islice(frames, WINDOW)):
                _exchange(dealer, batch)
                num_sent += len(batch)
                if num_sent <= num_frames // 10:
                    before = held()
            after = held()
            signer = FrameSigner(secret)
            dealer.send(
                signer.prove(wire.encode(wire.DescribeRequest(engine_id=ENGINE, tp_rank=0)))
            )
            reply = wire.decode_reply(signer.check(dealer.recv_multipart()[-1]))
            assert isinstance(reply, wire.Described), reply
    finally:
        server.close()
    return _growth(num_sent, server.num_refused, before, after)


def fuzz_notifications(num_notifications: int, seed: int) -> Growth:
    """Send garbage from one real agent to another, whose manager takes it in; a request that it
    holds must be released rightly at the end."""
    recorder, outcomes = TransferRecorder(), CompletionQueue()
    owner, sender = NixlAgent(CONFIG), NixlAgent(CONFIG)
    manager = LeaseManager(owner, WorkerTables(), CONFIG, recorder, outcomes)
    peer = sender.add_peer(owner.metadata())
    sender.connect(peer)
    messages = mutations(random.Random(seed), notifications(), num_notifications)
    before, num_sent = held(), 0
    while batch := list(islice(messages, WINDOW)):
        _deliver(sender, peer, manager, outcomes, batch)
        num_sent += len(batch)
        if num_sent <= num_notifications // 10:
            before = held()
    after = held()
    manager.end_leases()
    recorded = recorder.take() or {}
    sender.remove_peer(peer)
    sender.close()
    owner.close()
    return _growth(num_sent, recorded["unmatched_notifications"], before, after)


def _exchange(dealer: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    for frame in frames:
        dealer.send(frame[: wire.MAX_REQUEST_BYTES])
    for number in range(len(frames)):
        try:
            dealer.recv_multipart()
        except zmq.Again as error:
            raise TimeoutError(f"{len(frames) - number} frames were not answered") from error


def _deliver(
    sender: NixlAgent,
    peer: str,
    manager: LeaseManager,
    outcomes: CompletionQueue,
    batch: Sequence[bytes],
) -> None:
    name = f"held-{next(_numbers)}"
    manager.hold(Hold(name, 600.0, -1, 0))
    for message in batch:
        sender.notify(peer, message)
    sender.notify(peer, wire.encode(Released(request_id=name, consumer="d/0", num_consumers=1)))
    deadline = time.monotonic() + SECONDS
    while name not in outcomes.take().sent:
        manager.take_notifications()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} was not released")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--notifications", type=int, default=100_000)
    args = parser.parse_args()
    os.environ.update({name: CPU_ENVIRON[name] for name in ("UCX_TLS", "UCX_NET_DEVICES")})
    half = args.frames // 2
    runs: dict[str, Callable[[], Growth]] = {
        "side channel": lambda: fuzz_side_channel(args.frames - half, args.seed),
        "side channel with a secret": lambda: fuzz_side_channel(half, args.seed + 1, SECRET),
        "notifications": lambda: fuzz_notifications(args.notifications, args.seed),
    }
    steady = [_report(name, run) for name, run in runs.items()]
    return 0 if all(steady) else 1


def _report(name: str, run: Callable[[], Growth]) -> bool:
    started = time.monotonic()
    growth = run()
    print(
        f"{name}: {growth.num_sent} sent in {time.monotonic() - started:.0f} s, "
        f"{growth.num_refused} refused; {growth.heap_bytes / 2**20:+.1f} MiB, "
        f"{growth.num_blocks:+d} blocks, "
        f"{growth.num_threads:+d} threads, {growth.num_descriptors:+d} file descriptors",
        flush=True,
    )
    return is_steady(growth)


if __name__ == "__main__":
    sys.exit(main())
