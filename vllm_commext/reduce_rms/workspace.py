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
from vllm_commext.gpu import peer_check
from vllm_commext.gpu.ipc import IpcBuffer, allocate, free, round_up, write
from vllm_commext.gpu.launch import current_device
from vllm_commext.reduce_rms import layout
from vllm_commext.reduce_rms.layout import Failure, FailureKind, compute_comm_size_for_minimax

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
        rank: this process's rank in the group.
        world_size: ranks of the group.
        handle: the number that an op takes. Workspaces are numbered as they are made, so that a
            graph that was compiled in an earlier process finds the same one again.
    """

    def __init__(self, rank: int, world_size: int, words: torch.Tensor) -> None:
        self.rank, self.world_size, self._words = rank, world_size, words
        self.handle = next(_numbers)
        _by_handle[self.handle] = self

    @property
    def workspace(self) -> torch.Tensor:
        """Int64 tensor on the device, with the words of `layout` where a kernel takes it."""
        return self._words

    def forget(self) -> None:
        """Let `find` not find it any more."""
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
    """Return the workspace whose `Workspace.workspace` is this very tensor; ConfigError where none
    is."""
    address = words.data_ptr()
    for candidate in list(_by_handle.values()):
        if candidate.workspace.data_ptr() == address:
            return candidate
    raise ConfigError(
        "expected the `workspace` tensor of a live workspace, got one that belongs to none: it was "
        "cleaned up, or dropped while the tensor was kept"
    )


class GroupWorkspace(Workspace):
    """Adds over ranks by an all-reduce: on a CPU, and where peers' memory cannot be mapped.

    Args:
        process_group: None for the default group, or for a single rank where there is no group.
        device: where the workspace tensor is.
    """

    def __init__(
        self, process_group: "ProcessGroup | None" = None, device: "torch.device | str" = "cpu"
    ) -> None:
        self._group = process_group
        grouped = process_group is not None or distributed.is_initialized()
        rank = distributed.get_rank(process_group) if grouped else 0
        world_size = distributed.get_world_size(process_group) if grouped else 1
        super().__init__(rank, world_size, torch.zeros(1, dtype=torch.int64, device=device))

    def sum_over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Add `sums` over all ranks, in place."""
        if self.world_size > 1:
            distributed.all_reduce(sums, group=self._group)
        return sums

    def cleanup(self) -> None:
        self.forget()


class LamportWorkspace(Workspace):
    """Peer-mapped slots and the words that the kernel needs beside them; see `layout`.

    Made by all ranks of the group together, on the current GPU; it is there on all or on none.
    One workspace serves one stream at a time: calls that run at the same time are found out and
    fail. Calls on other streams need a workspace of their own.

    Args:
        rank: this process's rank in the group.
        world_size: ranks of the group, 2 to 8.
        comm_size: bytes of a slot, alike on all ranks; rounded up to 2 MiB.
        process_group: None for the default group.
        timeout_seconds: how long a token waits for a peer's sums.
        max_tokens_per_launch: fewer tokens a launch than a slot holds; 0 for as many.
        batch_invariant: a row has the same bits whatever else is in the batch, which costs the
            forms of the kernel that are fastest for few tokens and for many.

    Raises:
        ConfigError: an argument is out of its range.
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
        if world_size not in layout.WORLD_SIZES or not 0 <= rank < world_size:
            raise ConfigError(f"expected 2 to 8 ranks, got rank {rank} of {world_size}")
        if comm_size <= 0 or timeout_seconds <= 0:
            raise ConfigError(
                "expected a positive comm_size and timeout_seconds, "
                f"got {comm_size} and {timeout_seconds}"
            )
        self.comm_size = round_up(comm_size)
        self.timeout_ns = int(timeout_seconds * 1e9)
        capacity = layout.slot_capacity(self.comm_size, world_size)
        self.max_tokens_per_launch = min(max_tokens_per_launch or capacity, capacity)
        self._collective, self.batch_invariant = Collective.over(process_group), batch_invariant
        self.ready: set[Hashable] = set()
        self._private = 0
        self._agree(world_size)
        _check_peers(self._collective)
        self._buffer: IpcBuffer | None = IpcBuffer(
            self._collective, layout.NUM_SLOTS * self.comm_size, fill=layout.SENTINEL_BITS
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
        num_words = layout.num_words(buffer.world_size)
        self._private = allocate((num_words + 1) * 8 + round_up(capacity * 4, 8))
        self._failure_ptr = self._private + num_words * 8
        self.states_ptr = self._failure_ptr + 8
        addresses = [self.states_ptr, self._failure_ptr, self._report.data_ptr()]
        words = [*buffer.serialize(), *addresses, self.comm_size, rank]
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
        """Address of the words of `layout`; torch, and vLLM when it sleeps, know nothing of it."""
        return self._private

    def prepare(self, kinds: Iterable[Hashable], step: Callable[[], object]) -> None:
        """Take a step before the first call of some kinds, on all ranks together; they are `ready`.

        Raises:
            UnsupportedError: it failed on some rank; all ranks raise it.
        """
        self._collective.agree(step)
        self.ready.update(kinds)

    @staticmethod
    def compute_comm_size_for_minimax(
        max_tokens: int, world_size: int, fused_qk: bool = True
    ) -> int:
        """See `layout.compute_comm_size_for_minimax`."""
        return compute_comm_size_for_minimax(max_tokens, world_size, fused_qk)

    @property
    def failure(self) -> Failure | None:
        """The first failure that a kernel has reported since the workspace was made."""
        return layout.decode_failure(self._reported.value)

    def raise_if_failed(self) -> None:
        """Raise the error of the first failure that a kernel has reported.

        A failed workspace stays failed: its rows come out as NaN, for ranks no longer agree about
        their slots. Make a new one on all ranks.

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
        """Wait for this GPU's kernels, whose waits are bounded, then give all memory back.

        Memory is freed when the peers have unmapped it, for which a gloo group is waited for
        `CLEANUP_SECONDS` at most. To be called on all ranks.
        """
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

    def __repr__(self) -> str:
        return (
            f"LamportWorkspace(rank={self.rank}, world_size={self.world_size}, "
            f"comm_size={self.comm_size})"
        )


def _check_peers(collective: Collective) -> None:
    """Check peers in memory of its own, whose sentinel is another than the slots'; collective."""
    greetings = IpcBuffer(collective, peer_check.EXCHANGED_BYTES, fill=peer_check.EMPTY)
    try:
        peer_check.check_delivery(greetings.serialize(), collective)
    finally:
        greetings.cleanup(CLEANUP_SECONDS)


def _pinned_word() -> torch.Tensor:
    """Host memory that a kernel can write to; vLLM makes its models with a GPU as the default."""
    return torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)


_Key = tuple[int, int, int, int, str, int]
_cache: "dict[_Key, tuple[weakref.ref[ProcessGroup], LamportWorkspace]]" = {}
_cache_lock = threading.Lock()


def get_allreduce_workspace(
    rank: int,
    world_size: int,
    comm_size: int | None = None,
    max_tokens: int = 16384,
    process_group: "ProcessGroup | None" = None,
    *,
    name: str = "",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The workspace tensor of a group, made at the first call and kept.

    Args:
        rank: this process's rank in the group.
        world_size: ranks of the group.
        comm_size: bytes of a slot; None for what `max_tokens` tokens take.
        max_tokens: tokens of one launch; more go in pieces.
        process_group: None for the default group.
        name: another name gives another workspace, as calls on another stream need.
        timeout_seconds: how long a token waits for a peer's sums; of the first call only.
        batch_invariant: as `LamportWorkspace` has it; of the first call only.

    Raises:
        CommextError: as `LamportWorkspace`.
    """
    if comm_size is None:
        comm_size = compute_comm_size_for_minimax(max_tokens, world_size)
    group = process_group if process_group is not None else distributed.group.WORLD
    if group is None:
        raise ConfigError("expected a process group, got none: torch.distributed has no default")
    key = (rank, world_size, comm_size, torch.cuda.current_device(), name, id(group))
    with _cache_lock:
        _drop_stale()
        known, kept = _cache.get(key, (None, None))
        if kept is not None and known is not None and known() is group:
            return kept.workspace
        made = LamportWorkspace(
            *(rank, world_size, comm_size, group),
            timeout_seconds=timeout_seconds,
            batch_invariant=batch_invariant,
        )
        _cache[key] = (weakref.ref(group), made)
        return made.workspace


def _drop_stale() -> None:
    """Let go of what belongs to groups that are gone; an address of theirs may be another's now."""
    for key in [key for key, (group, _) in _cache.items() if group() is None]:
        del _cache[key]


def cleanup_all() -> None:
    """Clean up every workspace that `get_allreduce_workspace` keeps; on all ranks alike."""
    with _cache_lock:
        for _, kept in _cache.values():
            with contextlib.suppress(CommextError, RuntimeError):
                kept.cleanup()
        _cache.clear()


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
    would go on to serve nonsense. A worker that ends is what engines know how to report.
    """
    if isinstance(workspace, LamportWorkspace):
        watched = weakref.ref(workspace)
        threading.Thread(
            target=_watch, args=(watched,), name="commext-reduce-rms-watch", daemon=True
        ).start()
