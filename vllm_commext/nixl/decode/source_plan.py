"""Which workers of a prefill engine this decode worker has to do with, for each size of engine."""

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.decode.links import LocalWorker
from vllm_commext.nixl.geometry.topology import Sources, check_even, over_stages, sources


class SourcePlan:
    """This worker's part in reading, worked out once for each size of prefill engine.

    Args:
        local: this worker, and what the other stages of its engine deal out.
    """

    def __init__(self, local: LocalWorker) -> None:
        self._layout = local.layout
        self._splits = local.splits
        self._known: dict[tuple[int, int], Sources] = {}

    def check(self, tp_size: int) -> None:
        """Refuse an engine whose ranks hold different numbers of something.

        Raises:
            UnsupportedError: says of what.
        """
        for split in self._splits:
            check_even(split, tp_size, "the prefill engine's ranks")

    def of(self, tp_size: int, pp_size: int) -> Sources:
        """The part in reading from ``pp_size`` stages of ``tp_size`` ranks, by worker numbers."""
        size = tp_size, pp_size
        if size not in self._known:
            self._known[size] = over_stages(
                self._within_stage(tp_size),
                tp_size,
                num_stages=pp_size,
                num_reader_stages=self._layout.pp_size,
            )
        return self._known[size]

    def _within_stage(self, tp_size: int) -> Sources:
        rank = self._layout.rank
        try:
            self.check(tp_size)
        except UnsupportedError:
            # No rank of this engine reads: the first one of each stage releases all of them.
            ranks = tuple(range(tp_size)) if rank.index == 0 else ()
            return Sources((), ranks, dict.fromkeys(ranks, 1))
        return sources(self._splits, rank, tp_size)
