"""Prefill workers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import uuid
from dataclasses import asdict
from pathlib import Path

from tests.cpu.nixl_agents.harness import (
    ALONE,
    BOUND_SECONDS,
    DESCRIPTION,
    STRIDE_BYTES,
    Engine,
    memory_of,
    wait_until,
)
from tests.kit import forked
from tests.kit.processes import stat_of
from tests.kit.servers import free_port
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.requests import RemoteRequest

PROGRAM = Path(__file__).with_name("prefill_process.py")
MODULES = ("torch", "numpy", "msgspec", "zmq")
"""What takes longest of its imports: peers are forked from a process that has them."""


class PeerProcess:
    """A prefill worker in its own process, which can be stopped, continued and killed; its side
    channel, where it ``serves`` one, is in this process, so that it answers all the while, or with
    ``whole`` in its own, so that it ends with it.  Of a prompt, ``num_computed`` blocks are
    computed.  It ``reads`` a remote request first."""

    def __init__(
        self,
        engine_id: str,
        *,
        seed: int,
        num_blocks: int = 24,
        port: int = 0,
        serve: bool = True,
        whole: bool = False,
        num_computed: int = 0,
        reads: RemoteRequest | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = uuid.uuid4().hex
        self.port = port or free_port()
        self.rank = ALONE
        self.memory = memory_of(seed, 3, num_blocks, STRIDE_BYTES)
        numbers = (seed, num_blocks, self.port if whole else 0, num_computed)
        wanted = json.dumps(asdict(reads)) if reads else ""
        arguments = [engine_id, self.incarnation, wanted, *map(str, numbers)]
        program = {"code": PROGRAM.read_text(), "arguments": arguments}
        reader, writer = os.pipe()
        with os.fdopen(reader) as output:
            self._process = forked.start(program, os.environ, MODULES, (writer, 2))
            os.close(writer)
            line = next(line for line in output if line.startswith(DESCRIPTION))
        pid, description = line.removeprefix(DESCRIPTION).split()
        self._pid = int(pid)
        self.description = bytes.fromhex(description)
        self.server: SideChannelServer | None = None
        if serve and not whole:
            self.serve(self.description)

    remote = Engine.remote
    serve = Engine.serve

    def stop(self) -> None:
        """Stop the process; returns when each of its threads has stopped."""
        os.kill(self._pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._pid}/task")
        wait_until(
            lambda: all(stat_of(task)[0] == "T" for task in tasks.iterdir()),
            "the peer's threads to stop",
        )

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, and its side channel with it."""
        if self.server is not None:
            self.server.close()
        os.kill(self._pid, signal.SIGKILL)
        self._process.wait(BOUND_SECONDS)
        self._process.stdin.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
