"""A worker that lives on while its peer is killed and restarted many times holds no more
afterwards, both as a decode worker, which reads from the peer, and as a prefill worker, which it
reads from."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.nixl_agents.harness import assert_works, free_port, wait_until
from tests.cpu.nixl_agents.peer_process import PeerProcess
from vllm_commext.nixl.requests import Hold

pytestmark = pytest.mark.timeout(300)

MakeEngine = Callable[..., Any]
NUM_RESTARTS, NUM_BEFORE = 8, 3
"""In all, and until NIXL and the interpreter have got most of what they use again."""
CLOSE_WAIT = "08"
FEW = 5
"""Threads and file descriptors that NIXL and the interpreter may have got late; a leak has one for
each restart."""


def held(survivor: Any) -> dict[str, int]:
    """What the survivor holds, by kind."""
    peers = survivor.thread._loader._peers
    links = peers._links
    return {
        "peers": len(peers._peers),
        "connections": len(links._existing()),
        "agents": len(links._agents),
        "descriptor lists": len(links._local_lists),
        "leases": len(survivor.thread._lease_manager._leases)
        + len(survivor.thread._lease_manager._holds),
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
    }


def allowed(before: dict[str, int]) -> dict[str, int]:
    """What the survivor may hold at the end, by kind, given what it held ``before``."""
    late = {"threads": FEW, "file descriptors": FEW}
    return {kind: count + late.get(kind, 0) for kind, count in before.items()}


def num_half_closed() -> int:
    """This process's TCP connections that their other end has closed and this one has not."""
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    own = {os.path.basename(os.path.realpath(link)) for link in links}  # one may close meanwhile
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()]
    return sum(row[3] == CLOSE_WAIT and f"socket:[{row[9]}]" in own for row in rows)


def test_a_peer_that_is_restarted_many_times_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    gc.collect()  # agents of earlier tests hold threads and descriptors
    survivor = make_engine("survivor", seed=2, serve=True, backend_params={"num_threads": "4"})
    port = free_port()
    kinds: list[dict[str, int]] = []
    for number in range(NUM_RESTARTS + 1):
        name = f"start-{number}"
        survivor.thread.submit(Hold(name, 600.0))
        reads = survivor.remote(name, [3])
        with PeerProcess("peer", seed=7, port=port, whole=True, reads=reads) as peer:
            survivor.wait(lambda name=name: name in survivor.collect().sent)
            assert_works(survivor, peer, f"read-{number}")
            if number == NUM_RESTARTS:
                most = allowed(kinds[0])
                wait_until(
                    lambda most=most: all(n <= most[kind] for kind, n in held(survivor).items()),
                    f"{held(survivor)} to be at most {most}",
                )
            if number == NUM_BEFORE:
                wait_until(lambda: not num_half_closed(), "NIXL to close what it had to")
                kinds.append(held(survivor))
    assert kinds[0]["peers"] == kinds[0]["connections"] == kinds[0]["agents"] == 1
