"""A prefill engine's worker in a process of its own, which reads from another engine where it is
to, tells what it is, and waits."""

import json
import os
import signal
import sys

from tests.cpu.nixl_agents.harness import BLOCK_SIZE, DESCRIPTION, STREAM, Engine, load_of
from vllm_commext.nixl.requests import Chunk, RemoteRequest


def begin_prompt(engine: Engine, num_blocks: int) -> None:
    """Publish the first blocks of a prompt, which are those from 1 on."""
    assert engine.publisher is not None
    engine.tables.fences.nonces[STREAM["fence_slot"]] = STREAM["fence_nonce"]
    row, nonce = STREAM["stream_row"], STREAM["stream_tag"]
    block_ids = tuple(range(1, 1 + num_blocks))
    chunk = Chunk(row, nonce, ((0, block_ids),), BLOCK_SIZE * num_blocks, begins=True)
    engine.publisher.launched([chunk])


def main() -> None:
    engine_id, incarnation, wanted, *numbers = sys.argv[1:]
    seed, num_blocks, port, num_computed = map(int, numbers)
    engine = Engine(
        engine_id,
        seed=seed,
        num_blocks=num_blocks,
        port=port,
        incarnation=incarnation,
        serve=port > 0,
        stream_chunks=num_computed > 0,
    )
    if engine.publisher is not None:
        begin_prompt(engine, num_computed)
    if wanted:
        told = json.loads(wanted)
        remote = RemoteRequest(**{**told, "block_ids": (tuple(*told["block_ids"]),)})
        assert not engine.load(load_of(incarnation, remote, [5])).failed
    # In one piece, with a line of its own: NIXL writes to the same output.
    os.write(1, f"\n{DESCRIPTION}{os.getpid()} {engine.description.hex()}\n".encode())
    signal.pause()


if __name__ == "__main__":
    main()
