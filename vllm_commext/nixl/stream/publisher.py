"""The prefill worker's side of chunk streaming: says what has been computed once it has been.

A step's kernels are only launched when vLLM says that the step is done; an event that is recorded
behind them tells of their end.  On a CPU the launch is the end.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.requests import Chunk, Hold, Restart
from vllm_commext.nixl.stream.progress import ProgressTable


class Event(Protocol):
    """What tells that work on a device has ended."""

    def query(self) -> bool:
        """Whether it has."""
        ...


class Publisher:
    """Publishes one worker's chunks; safe for threads.

    Args:
        progress: the worker's rows.
        fences: its fences.
        is_on_device: the cache is not in host memory.
    """

    def __init__(self, progress: ProgressTable, fences: FenceTable, *, is_on_device: bool) -> None:
        self._progress = progress
        self._fences = fences
        self._is_on_device = is_on_device
        self._lock = threading.Lock()
        self._launched: deque[tuple[Event, Sequence[Chunk | Hold]]] = deque()

    def __len__(self) -> int:
        """Steps whose end is not known yet."""
        return len(self._launched)

    def prepare(self, chunks: list[Chunk], restarts: list[Restart]) -> None:
        """A step's kernels are going to be launched.  Of prompts that were preempted the fence is
        replaced first, so that no reader relies on what it reads from now on."""
        for one in restarts:
            self._progress.restart(one.row, self._fences.end(one.slot, one.nonce))
        for chunk in chunks:
            if chunk.begins:
                self._progress.begin(chunk.row, chunk.nonce)

    def launched(self, chunks: list[Chunk]) -> None:
        """They are launched."""
        self.prepare([chunk for chunk in chunks if chunk.begins], [])  # where vLLM did not say so
        self._publish_behind(chunks)

    def ended(self, holds: Sequence[Hold]) -> None:
        """Prompts have ended: what is known of their blocks since then is published behind their
        last chunks."""
        self._publish_behind([hold for hold in holds if hold.listed])

    def _publish_behind(self, told: Sequence[Chunk | Hold]) -> None:
        """Publish when all that has been launched so far has ended."""
        if not self._is_on_device:
            self._publish(told)
        elif told:
            event: Any = torch.Event()
            event.record()
            with self._lock:
                self._launched.append((event, told))

    def poll(self) -> None:
        """Publish what has been computed meanwhile."""
        with self._lock:
            while self._launched and self._launched[0][0].query():
                self._publish(self._launched.popleft()[1])

    def _publish(self, told: Sequence[Chunk | Hold]) -> None:
        for one in told:
            if isinstance(one, Chunk):
                self._progress.publish(one.row, one.nonce, one.listed, one.num_tokens)
            else:
                self._progress.complete(one.stream_row, one.fence_nonce, one.listed)
