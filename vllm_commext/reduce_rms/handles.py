"""Numbers that ops take in place of workspace objects."""

import itertools
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import distributed

from vllm_commext.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_by_handle: "weakref.WeakValueDictionary[int, Workspace]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


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
