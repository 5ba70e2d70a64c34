"""A program that has imported everything and forks a peer for each line that it is told, so that
peers start quickly.

A peer is a whole engine, both a prefill and a decode worker.  It reads once from the survivor, says
that it is ready, and serves its side channel from the signal SIGUSR1 on.  A line holds the port of
its side channel, its incarnation, and what to read: the fields of a ``RemoteRequest``.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

from tests.cpu.nixl_agents.harness import BOUND_SECONDS, Engine, load_of
from vllm_commext.nixl.requests import RemoteRequest

EVENT = "event: "
ENGINE_ID = "peer"
SEED = 7
PR_SET_PDEATHSIG = 1


def tell(incarnation: str, what: str) -> None:
    """One line in one piece: the peers share the standard output."""
    os.write(1, f"\n{EVENT}{incarnation} {what}\n".encode())


def live(port: int, incarnation: str, wanted: dict[str, Any]) -> None:
    """A peer's life; it ends with the process."""
    engine = Engine(
        ENGINE_ID,
        seed=SEED,
        port=port,
        incarnation=incarnation,
        backend_params={"num_threads": "0"},
    )
    block_ids = (tuple(wanted.pop("block_ids")),)
    engine.load(load_of(incarnation, RemoteRequest(**wanted, block_ids=block_ids), [5]))
    tell(incarnation, "failed" if engine.outcomes.failed else "ready")
    signal.sigtimedwait({signal.SIGUSR1}, BOUND_SECONDS)
    engine.serve(engine.description)
    tell(incarnation, "serving")
    signal.sigtimedwait({signal.SIGTERM}, BOUND_SECONDS)


def main() -> None:
    importlib.import_module("nixl._api")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with this program
            try:
                live(**told)
            finally:
                os._exit(0)
        tell(told["incarnation"], f"pid {pid}")


if __name__ == "__main__":
    main()
