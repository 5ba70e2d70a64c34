"""The prefill worker's side of chunk streaming: says what has been computed once it has been.

A step's kernels are only launched when vLLM says that the step is done; an event that is recorded
behind them tells of their end.  On a CPU the launch is the end.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

import torch

from vllm_commext.nixl.prefill.fence import FenceTable
from vllm_commext.nixl.requests import Chunk, Restart
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
        self._launched: deque[tuple[Event, list[Chunk]]] = deque()

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
        if not self._is_on_device:
            self._publish(chunks)
        elif chunks:
            event: Any = torch.Event()
            event.record()
            with self._lock:
                self._launched.append((event, chunks))

    def poll(self) -> None:
        """Publish what has been computed meanwhile."""
        with self._lock:
            while self._launched and self._launched[0][0].query():
                self._publish(self._launched.popleft()[1])

    def _publish(self, chunks: list[Chunk]) -> None:
        for one in chunks:
            self._progress.publish(one.row, one.nonce, one.first, one.block_ids, one.num_tokens)
