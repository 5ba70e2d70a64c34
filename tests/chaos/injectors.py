"""Who does what nobody should: senders of garbage, a foreign agent, clients that go away."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Sequence

import httpx
import zmq

from tests.chaos.garbage import mutations, requests
from tests.kit import ROOT
from tests.kit.cluster import MODEL_NAME
from tests.kit.parity import stream
from tests.kit.processes import run
from tests.kit.servers import CPU_ENVIRON
from vllm_commext.nixl.wire.connection import endpoint

SECONDS = 10.0
ROGUE_SECONDS = 300.0


def send_side_channel_garbage(host: str, port: int, rng: random.Random, count: int) -> None:
    """Malformed frames by ZMQ, and raw bytes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint(host, port))
        for frame in mutations(rng, requests(), count):
            with contextlib.suppress(zmq.Again):
                dealer.send(frame, zmq.NOBLOCK)
            while dealer.poll(0):
                dealer.recv_multipart()
        dealer.poll(1000)
    for _ in range(3):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), timeout=SECONDS) as raw,
        ):
            raw.sendall(rng.randbytes(2000))
            time.sleep(0.02)


def send_notifications(where: tuple[str, int, str], seed: int, count: int) -> list[str]:
    """Malformed NIXL notifications from a process of their own; why they were not sent."""
    host, port, engine_id = where
    arguments = ["ours", host, str(port), engine_id, str(seed), str(count)]
    environ = {**os.environ, **CPU_ENVIRON}
    if host != "127.0.0.1":
        environ.pop("UCX_NET_DEVICES")
    command = [sys.executable, "-m", "tests.chaos.rogue", *arguments]
    done = run(command, env=environ, cwd=ROOT, seconds=ROGUE_SECONDS)
    return [f"the foreign agent failed: {done.stderr[-300:]}"] if done.returncode else []


def abort_requests(url: str, prompts: Sequence[Sequence[int]], rng: random.Random) -> None:
    """Requests whose clients go away: some at once, some after the first piece of the answer."""
    for number, prompt in enumerate(prompts):
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 64, "stream": True}
        seconds = SECONDS if number % 2 else rng.uniform(0.001, 0.2)
        with (
            contextlib.suppress(httpx.HTTPError),
            stream(f"{url}/v1/completions", body, seconds) as response,
        ):
            next(response.iter_raw(), b"")
