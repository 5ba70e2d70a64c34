"""Workspaces, which ops take by number: the memory that the ranks' sums travel through."""

import contextlib
import ctypes
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import distributed

from vllm_commext.collective import Collective
from vllm_commext.errors import CommextError, CommextTimeoutError, ConfigError, ProtocolError
from vllm_commext.gpu.ipc import (
    EMPTY,
    EXCHANGED_BYTES,
    IpcBuffer,
    allocate,
    check_delivery,
    free,
    round_up,
    write,
)
from vllm_commext.gpu.launch import current_device
from vllm_commext.reduce_rms import kernel
from vllm_commext.reduce_rms.kernel import Failure, FailureKind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_by_handle: "weakref.WeakValueDictionary[int, Workspace]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
DEFAULT_TIMEOUT_SECONDS = 30.0
CLEANUP_SECONDS = 5.0
DEVICE = "cuda"
logger = logging.getLogger("vllm.commext.reduce_rms")

INTERVAL_SECONDS = 1.0
EXIT_CODE = 70


class Workspace(ABC):
    """Base of all workspaces.

    Attributes:
        handle: the number that an op takes. Workspaces are numbered as they are made, so that a
            graph that was compiled in an earlier process finds the same one again.
        workspace: int64 tensor on the device, for `find_tensor`.
    """

    def __init__(self, rank: int, world_size: int, words: torch.Tensor) -> None:
        self.rank, self.world_size, self.workspace = rank, world_size, words
        self.handle = next(_numbers)
        _by_handle[self.handle] = self

    def forget(self) -> None:
        _by_handle.pop(self.handle, None)

    @abstractmethod
    def cleanup(self) -> None:
        """Free everything; a second call does nothing."""


def find(handle: int) -> Workspace:
    """Return the workspace of that number; ConfigError where there is none."""
    found = _by_handle.get(handle)
    if found is None:
        raise ConfigError(
            f"expected the handle of a live workspace, got {handle}: it was cleaned up or dropped, "
            "or no workspace was ever made"
        )
    return found


def find_tensor(words: torch.Tensor) -> Workspace:
    """Return the workspace whose `Workspace.workspace` is this tensor; ConfigError if none is."""
    address = words.data_ptr()
    for candidate in list(_by_handle.values()):
        if candidate.workspace.data_ptr() == address:
            return candidate
    raise ConfigError(
        "expected the `workspace` tensor of a live workspace, got one that belongs to none: it was "
        "cleaned up, or dropped while the tensor was kept"
    )


class GroupWorkspace(Workspace):
    """Adds over ranks by an all-reduce: on a CPU, and where peers' memory cannot be mapped. Without
    a process group it is torch's default one, or a single rank."""

    def __init__(
        self, process_group: "ProcessGroup | None" = None, device: "torch.device | str" = "cpu"
    ) -> None:
        self._group = process_group
        grouped = process_group is not None or distributed.is_initialized()
        rank = distributed.get_rank(process_group) if grouped else 0
        world_size = distributed.get_world_size(process_group) if grouped else 1
        super().__init__(rank, world_size, torch.zeros(1, dtype=torch.int64, device=device))

    def sum_over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            distributed.all_reduce(sums, group=self._group)
        return sums

    def cleanup(self) -> None:
        self.forget()


class LamportWorkspace(Workspace):
    """Peer-mapped slots and the words that the kernel needs beside them; see `kernel`.

    Made by all ranks of the group together, on the current GPU; it is there on all or on none.
    One workspace serves one stream at a time: calls that run at the same time are found out and
    fail. Calls on other streams need a workspace of their own.

    Args:
        world_size: 2 to 8.
        comm_size: bytes of a slot, alike on all ranks; rounded up to 2 MiB.
        timeout_seconds: how long a token waits for a peer's sums.
        max_tokens_per_launch: fewer tokens a launch than a slot holds; 0 for as many.
        batch_invariant: a row has the same bits whatever else is in the batch, which costs the
            forms of the kernel that are fastest for few tokens and for many.

    Raises:
        UnsupportedError: a peer's memory cannot be mapped, or what is stored there does not arrive,
            on any rank.
        ProtocolError: the ranks differ in their arguments.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        comm_size: int,
        process_group: "ProcessGroup | None" = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_tokens_per_launch: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        if world_size not in kernel.WORLD_SIZES or not 0 <= rank < world_size:
            raise ConfigError(f"expected 2 to 8 ranks, got rank {rank} of {world_size}")
        if comm_size <= 0 or timeout_seconds <= 0:
            raise ConfigError(
                "expected a positive comm_size and timeout_seconds, "
                f"got {comm_size} and {timeout_seconds}"
            )
        self.comm_size = round_up(comm_size)
        self.timeout_ns = int(timeout_seconds * 1e9)
        capacity = kernel.slot_capacity(self.comm_size, world_size)
        self.max_tokens_per_launch = min(max_tokens_per_launch or capacity, capacity)
        self._collective, self.batch_invariant = Collective.over(process_group), batch_invariant
        self.ready: set[Hashable] = set()
        self._private = 0
        self._agree(world_size)
        _check_peers(self._collective)
        self._buffer: IpcBuffer | None = IpcBuffer(
            self._collective, kernel.NUM_SLOTS * self.comm_size, fill=kernel.SENTINEL_BITS
        )
        try:
            self._collective.agree(lambda: self._allocate(self._buffer, rank, capacity))
        except Exception:
            self._buffer.cleanup(CLEANUP_SECONDS)
            self._free_private()
            raise
        token = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        super().__init__(rank, world_size, token)

    def _allocate(self, buffer: IpcBuffer | None, rank: int, capacity: int) -> None:
        """Allocate what only this rank sees: the kernel's words, the failure and the states."""
        assert buffer is not None
        self.device = current_device()
        self._report = _pinned_word()
        self._reported = ctypes.c_uint64.from_address(self._report.data_ptr())
        num_words = kernel.num_words(buffer.world_size)
        self._private = allocate((num_words + 1) * 8 + round_up(capacity * 4, 8))
        self._failure_ptr = self._private + num_words * 8
        self.states_ptr = self._failure_ptr + 8
        addresses = [self.states_ptr, self._failure_ptr, self._report.data_ptr()]
        words = [*buffer.peer_ptrs, *addresses, self.comm_size, rank]
        write(self._private, b"".join(word.to_bytes(8, "little") for word in words))

    def _free_private(self) -> None:
        if self._private:
            free(self._private)
        self._private = 0

    def _agree(self, world_size: int) -> None:
        sizes = self.comm_size, self.max_tokens_per_launch
        theirs = self._collective.run(lambda: (world_size, *sizes))
        if any(other != (self._collective.world_size, *sizes) for other in theirs):
            raise ProtocolError(
                "expected the same world_size, comm_size and max_tokens_per_launch on all ranks, "
                f"got {theirs} in the order of ranks"
            )

    @property
    def words_ptr(self) -> int:
        """Address of the words of `kernel`; torch, and vLLM when it sleeps, know nothing of it."""
        return self._private

    def prepare(self, kinds: Iterable[Hashable], step: Callable[[], object]) -> None:
        """Take a step before the first call of some kinds, on all ranks together; they are `ready`,
        or all ranks raise UnsupportedError."""
        self._collective.agree(step)
        self.ready.update(kinds)

    @property
    def failure(self) -> Failure | None:
        return kernel.decode_failure(self._reported.value)

    def raise_if_failed(self) -> None:
        """Raise the first failure that a kernel has reported. A failed workspace stays failed:
        ranks no longer agree about their slots.

        Raises:
            CommextTimeoutError: a peer's sums did not come in time.
            ProtocolError: two calls used the workspace at the same time.
        """
        failure = self.failure
        if failure is None:
            return
        seconds = self.timeout_ns / 1e9
        if failure.kind is FailureKind.MISSING_PEER:
            raise CommextTimeoutError(
                f"expected the sums of rank {failure.rank} for token {failure.token} within "
                f"{seconds:g} s, got none; rank {self.rank}'s workspace is of no use any more: end "
                "the job, or make a new workspace on all ranks"
            )
        raise ProtocolError(
            f"expected one call at a time, got two that used rank {self.rank}'s workspace at the "
            f"same time, at token {failure.token}; give each stream a workspace of its own"
        )

    def cleanup(self) -> None:
        """Wait for this GPU's kernels, then free all memory when the peers have unmapped it, or
        after `CLEANUP_SECONDS`; on all ranks."""
        self._cleanup(CLEANUP_SECONDS)

    def _cleanup(self, seconds: float) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is None:
            return
        self._buffer = None
        if hasattr(self, "handle"):
            self.forget()
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.device.ordinal)
        buffer.cleanup(seconds)
        self._free_private()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._cleanup(0)


def _check_peers(collective: Collective) -> None:
    """Check peers in memory of its own, whose sentinel is another than the slots'; collective."""
    greetings = IpcBuffer(collective, EXCHANGED_BYTES, fill=EMPTY)
    try:
        check_delivery(greetings.peer_ptrs, collective)
    finally:
        greetings.cleanup(CLEANUP_SECONDS)


def _pinned_word() -> torch.Tensor:
    """Host memory that a kernel can write to; vLLM makes its models with a GPU as the default."""
    return torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)


def _watch(watched: "weakref.ref[LamportWorkspace]") -> None:
    while (workspace := watched()) is not None:
        try:
            workspace.raise_if_failed()
        except CommextError as error:
            logger.critical("commext: reduce_rms failed, this process ends: %s", error)
            logging.shutdown()
            os._exit(EXIT_CODE)
        del workspace
        time.sleep(INTERVAL_SECONDS)


def end_process_on_failure(workspace: Workspace) -> None:
    """End the process once the workspace has failed; look every second while it is there.

    A replayed graph runs none of our Python, and the rows of a failed workspace are NaN: an engine
    would go on to serve nonsense. A worker that ends is what engines know how to report."""
    if isinstance(workspace, LamportWorkspace):
        watched = weakref.ref(workspace)
        threading.Thread(
            target=_watch, args=(watched,), name="commext-reduce-rms-watch", daemon=True
        ).start()
