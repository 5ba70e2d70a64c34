"""The choice of a backend, from what is the same on every rank."""

from collections.abc import Callable, Mapping

import msgspec

from vllm_commext.allreduce import names
from vllm_commext.allreduce.message import ITEM_BYTES, Message
from vllm_commext.allreduce.table.table import Table

Takes = Callable[[Message], bool]


class Policy:
    """Which backends may serve a message, in the order in which to try them.

    Args:
        takes: for each backend that was created on all ranks, whether it can take a message.
        table: what was measured; None where nothing was.
        forced: the one backend that the user wants, `names.VLLM` for none of ours, or None.
    """

    def __init__(
        self, takes: Mapping[str, Takes], table: Table | None, forced: str | None = None
    ) -> None:
        self._takes, self._table, self._forced = dict(takes), table, forced

    def ranking(self, message: Message) -> tuple[str, ...]:
        """Backends by speed, whether or not they can take the message."""
        if message.dtype not in ITEM_BYTES or self._forced == names.VLLM:
            return ()
        if self._forced is not None:
            return (self._forced,)
        ranking = self._table.ranking(message.num_bytes, message.dtype) if self._table else ()
        return ranking[: ranking.index(names.VLLM)] if names.VLLM in ranking else ranking

    def candidates(self, message: Message) -> tuple[str, ...]:
        """Those that can take it; none leaves the message to vLLM's default dispatch."""
        return tuple(
            name
            for name in self.ranking(message)
            if name in self._takes and self._takes[name](message)
        )


class FusedPolicy:
    """Who serves an all-reduce with residual and norm.

    Args:
        table: what was measured; None where nothing was.
        forced: the one backend that the user wants for all sums: with ours come our kernels, with
            another one nothing is fused.
        throughout: a graph is ours only where one launch comes first for every message that it may
            have, and not where it does for some.
    """

    def __init__(
        self, table: Table | None, forced: str | None = None, *, throughout: bool = False
    ) -> None:
        self._table, self._forced, self._throughout = table, forced, throughout

    @property
    def is_forced(self) -> bool:
        """Whether the user's choice decides, and not a table."""
        return self._forced is not None

    def ranking(self, num_bytes: int, dtype: str) -> tuple[str, ...]:
        """Of `names.FUSED`, the fastest first; none where nothing is known."""
        if self._forced is not None:
            return (names.FUSED_PUSH,) if self._forced == names.PUSH else ()
        return self._table.fused_ranking(num_bytes, dtype) if self._table else ()

    def is_led(self, dtype: str, low_bytes: int, high_bytes: int) -> bool:
        """Whether our launch comes first for messages from `low_bytes` to `high_bytes`: for some of
        them, or for all where the policy is so. Where FlashInfer's does, vLLM's own pass puts it
        there."""
        rows = self._table.fused.get(dtype, ()) if self._table else ()
        starts = [low_bytes, *(row.max_bytes + 1 for row in rows)]
        within = (size for size in starts if low_bytes <= size <= high_bytes)
        led = (self.ranking(size, dtype)[:1] == (names.FUSED_PUSH,) for size in within)
        return all(led) if self._throughout else any(led)

    def changes(self, dtype: str) -> list[int]:
        """The sizes up to which a choice holds, where one launch comes first on one side of them
        and not on the other; none where the policy takes a graph for some of its messages."""
        rows = self._table.fused.get(dtype, ()) if self._table and self._throughout else ()
        return [
            row.max_bytes
            for row in rows[:-1]
            if self.is_led(dtype, row.max_bytes, row.max_bytes)
            != self.is_led(dtype, row.max_bytes + 1, row.max_bytes + 1)
        ]

    def identity(self) -> str:
        """Equal where all choices are."""
        fused = self._table.fused if self._table else {}
        return msgspec.json.encode([self._forced, self._throughout, fused], order="sorted").decode()
