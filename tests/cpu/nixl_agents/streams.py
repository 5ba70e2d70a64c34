"""Prompts that are read while they are computed: the prefill engine's scheduler side, side channel
and worker as they are, with steps that a test makes up."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.cpu.nixl_agents.harness import (
    BLOCK_SIZE,
    BOUND_SECONDS,
    HOST,
    STRIDE_BYTES,
    load_of,
    wait_until,
)
from tests.kit.stream_requests import request, step
from vllm_commext.nixl.engine_context import Streaming
from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.prefill.fence import FenceSlots
from vllm_commext.nixl.prefill.prefill_state import PrefillState
from vllm_commext.nixl.prefill.side_channel import SideChannelServer
from vllm_commext.nixl.reasons import Handover
from vllm_commext.nixl.requests import Hold, Load
from vllm_commext.nixl.stream.asker import StreamAsker
from vllm_commext.nixl.stream.producer import StreamDirectory, StreamProducer
from vllm_commext.nixl.wire.client import ClientThread
from vllm_commext.nixl.wire.params import TransferParams

FENCE_KEY = bytes(32)
NUM_ROWS = 4
CHUNKS = ((9, 4), (11, 2), (7, 15), (20, 3))
"""The prompt's blocks, chunk by chunk; its last one is filled by half."""
BLOCKS = tuple(itertools.chain(*CHUNKS))
NUM_TOKENS = BLOCK_SIZE * len(BLOCKS) - BLOCK_SIZE // 2
OWN_BLOCKS = (5, 1, 12, 8, 3, 21, 0, 17)
"""Where a decode engine wants them."""


def key_of(number: int) -> str:
    return f"{number:032x}"


class Prefill:
    """A prefill engine of one worker; nothing of a prompt is in its cache before its step."""

    def __init__(self, make_engine: Callable[..., Any], num_rows: int = NUM_ROWS) -> None:
        self.engine = make_engine("p", seed=1, stream_chunks=True)
        self.right = [row.copy() for row in self.engine.memory]
        for row in self.engine.memory:
            row[:] = 0
        self.engine.tables.fences.arm(FENCE_KEY)
        self.slots = FenceSlots(FENCE_KEY, 8)
        self.directory = StreamDirectory()
        groups = (Group(FULL, BLOCK_SIZE),)
        streaming = Streaming(None, groups, 24 * BLOCK_SIZE, 2 * BLOCK_SIZE)
        self.producer = StreamProducer(self.slots, self.directory, streaming, num_rows)
        self.states: dict[str, PrefillState] = {}
        self.engine.server = SideChannelServer(
            "p",
            self.engine.incarnation,
            HOST,
            self.engine.port,
            {0: self.engine.description},
            streams=self.directory,
        )

    def add(self, name: str, number: int, num_tokens: int = NUM_TOKENS, **changes: Any) -> str:
        """A request comes in; the way it goes."""
        state = PrefillState(request(name, key_of(number), num_tokens, **changes))
        self.states[name] = state
        return self.producer.add(state)

    def run(self, ran: Any, computed: Sequence[int]) -> None:
        """One step of the worker, which computes these blocks."""
        chunks, restarts = self.producer.take_step(self.states, ran)
        self.engine.publisher.prepare(chunks, restarts)
        for row, right in zip(self.engine.memory, self.right, strict=True):
            for block in computed:
                begin = block * STRIDE_BYTES
                row[begin : begin + STRIDE_BYTES] = right[begin : begin + STRIDE_BYTES]
        self.engine.publisher.launched(chunks)

    def compute(self, name: str, number: int, *, begins: bool | None = None) -> None:
        """The step of one chunk."""
        done = 2 * BLOCK_SIZE * number
        count = min(2 * BLOCK_SIZE, NUM_TOKENS - done)
        blocks = list(CHUNKS[number])
        is_first = number == 0 if begins is None else begins
        ran = {name: (done, [blocks], count)}
        self.run(step(new=ran) if is_first else step(cached=ran), blocks)

    def run_all(self, name: str) -> None:
        for number in range(len(CHUNKS)):
            self.compute(name, number)

    def preempt(self, name: str) -> None:
        """The request's blocks go to others, which overwrite them."""
        chunks, restarts = self.producer.take_step(self.states, step(preempted=[name]))
        self.engine.publisher.prepare(chunks, restarts)
        for row in self.engine.memory:
            row[:] = 255

    def finish(self, name: str, *, lease_seconds: float = 600.0) -> None:
        """The request has ended; without a lease, it was aborted."""
        state = self.states[name]
        self.producer.note_finish(state)
        assert state.row >= 0
        fence = state.slot, self.slots.nonce_in(state.slot)
        self.engine.thread.submit(Hold(name, lease_seconds, *fence, state.row))

    def wait_freed(self, name: str) -> None:
        """Until the worker says that the request's blocks are free."""
        self.engine.wait(lambda: name in self.engine.collect().sent)
        state = self.states.pop(name)
        self.slots.give_back(state.slot)
        self.producer.give_back(state)


class Decode:
    def __init__(self, make_engine: Callable[..., Any], port: int, **settings: Any) -> None:
        self.engine = make_engine(
            "d", seed=2, require_fence=True, **{"stream_chunks": True, **settings}
        )
        self.before = [row.copy() for row in self.engine.memory]
        self._place = HOST, port
        self._rings: list[None] = []
        self.client = ClientThread(None)
        self.asker = StreamAsker(self.client, "d", BOUND_SECONDS, BOUND_SECONDS, self._ring)

    def _ring(self) -> None:
        self._rings.append(None)

    def ask(self, name: str, number: int) -> Any:
        """What the prefill engine says of a key."""
        self.asker.watch(name, key_of(number), self._place)
        wait_until(lambda: self.asker.answer(name) is not None, "an answer about a stream")
        assert self._rings
        return self.asker.answer(name)

    def load(self, name: str, number: int, first: int = 0) -> Load:
        """Begin to load the prompt with a key, of which the first blocks are here."""
        transfer_params = self.ask(name, number)
        assert isinstance(transfer_params, TransferParams), transfer_params
        load = load_of(name, transfer_params.remote, OWN_BLOCKS[first:], first)
        load.num_tokens = NUM_TOKENS
        self.engine.thread.submit(load)
        return load

    def wait(self, name: str) -> str:
        """Until the load has ended; why it has failed, "" where it has not."""
        self.engine.wait(lambda: name in self.engine.collect().received)
        if name not in self.engine.outcomes.failed:
            return ""
        (reason,) = self.engine.recorded["failures"]
        return reason

    def has(self, source: Sequence[Any], begin: int, end: int) -> bool:
        """Whether the prompt's blocks in ``[begin, end)`` are here, but for the empty half of the
        last one."""
        return all(
            np.array_equal(row[: len(theirs)], theirs)
            for row, theirs in _halves(self.engine.memory, source, begin, end)
        )

    def is_untouched_but(self, num_blocks: int) -> bool:
        """Whether nothing was written beyond the first of the prompt's blocks."""
        touched = {OWN_BLOCKS[position] for position in range(num_blocks)}
        return all(
            np.array_equal(
                row[block * STRIDE_BYTES : (block + 1) * STRIDE_BYTES],
                before[block * STRIDE_BYTES : (block + 1) * STRIDE_BYTES],
            )
            for row, before in zip(self.engine.memory, self.before, strict=True)
            for block in range(len(row) // STRIDE_BYTES)
            if block not in touched
        )

    def close(self) -> None:
        self.client.close()


def _halves(memory: Sequence[Any], source: Sequence[Any], begin: int, end: int) -> Any:
    """Head by head, what the blocks hold here and there."""
    head_bytes, num_heads = 48, 2
    for row, theirs in zip(memory, source, strict=True):
        for position, head in itertools.product(range(begin, end), range(num_heads)):
            tokens = min(BLOCK_SIZE, NUM_TOKENS - position * BLOCK_SIZE)
            num_bytes = head_bytes // BLOCK_SIZE * tokens
            own = OWN_BLOCKS[position] * STRIDE_BYTES + head * head_bytes
            other = BLOCKS[position] * STRIDE_BYTES + head * head_bytes
            yield row[own : own + head_bytes], theirs[other : other + num_bytes]


def check_chunk_by_chunk(prefill: Prefill, decode: Decode) -> None:
    """Each chunk of a prompt comes when it is computed, and no other block changes."""
    assert prefill.add("r", 1) == Handover.STREAMED
    prefill.compute("r", 0)
    decode.load("d", 1)
    for number in range(len(CHUNKS)):
        stop = 2 * (number + 1)
        wait_until(lambda stop=stop: decode.has(prefill.right, 0, stop), f"chunk {number}")
        assert decode.is_untouched_but(stop)
        assert "d" not in decode.engine.collect().received or stop == len(BLOCKS)
        if stop < len(BLOCKS):
            prefill.compute("r", number + 1)
    assert decode.wait("d") == ""
