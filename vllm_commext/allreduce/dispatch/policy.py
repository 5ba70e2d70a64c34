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
        return self._table.ranking(message.num_bytes, message.dtype) if self._table else ()

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
    """

    def __init__(self, table: Table | None, forced: str | None = None) -> None:
        self._table, self._forced = table, forced

    def ranking(self, num_bytes: int, dtype: str) -> tuple[str, ...]:
        """Of `names.FUSED`, the fastest first; none where nothing is known."""
        if self._forced is not None:
            return (names.FUSED_PUSH,) if self._forced == names.PUSH else ()
        return self._table.fused_ranking(num_bytes, dtype) if self._table else ()

    def is_led(self, dtype: str, low_bytes: int, high_bytes: int) -> bool:
        """Whether our launch comes first for some message from `low_bytes` to `high_bytes`; where
        FlashInfer's does, vLLM's own pass puts it there."""
        rows = self._table.fused.get(dtype, ()) if self._table else ()
        starts = [low_bytes, *(row.max_bytes + 1 for row in rows)]
        within = (size for size in starts if low_bytes <= size <= high_bytes)
        return any(self.ranking(size, dtype)[:1] == (names.FUSED_PUSH,) for size in within)

    def identity(self) -> str:
        """Equal where all choices are."""
        fused = self._table.fused if self._table else {}
        return msgspec.json.encode([self._forced, fused], order="sorted").decode()
