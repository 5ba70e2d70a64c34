"""Lets NIXL's worker threads finish with peers that were removed.

With ``num_threads``, NIXL's UCX backend has a connection a worker thread to each peer.  Removing a
peer only begins to close them: a worker goes on with that when it next takes part in a read, which
it does only where the read has many descriptors.  Until then the sockets of a peer that has died
stay open.  So after a removal another peer's first nonce is read so many times over that every
worker gets a share.
"""

import math
import time
from collections.abc import Sequence

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import Link
from vllm_commext.nixl.transport.agent import NixlAgent
from vllm_commext.nixl.transport.posting import Posting
from vllm_commext.nixl.wire.description import FENCES

SPLIT_DESCRIPTORS = 1024
"""Descriptors of a read from which on NIXL shares it out, where ``split_batch_size`` is not set."""
NUM_ROUNDS = 7
"""Reads after a removal: idle workers take shares as they wake up, and where cores are busy one may
miss several rounds while the others take its shares."""
ROUND_SECONDS = 0.1
"""From one round to the next at least, so that loads do not wait for several of them; twice as long
after each round since the removal, so that some come when the cores are less busy."""


def num_descriptors(config: ConnectorConfig) -> int:
    """Descriptors of a read of which each of NIXL's worker threads gets a share; 0 without any."""
    if "UCX" not in config.backends:
        return 0
    split = int(config.backend_params.get("split_batch_size", SPLIT_DESCRIPTORS))
    return config.num_threads * max(1, split)


class Sweeper:
    """Reads of ``count`` descriptors that are due after removals.  Owned by one thread."""

    def __init__(self, agent: NixlAgent, count: int) -> None:
        self._agent = agent
        self._count = count
        self._num_due = 0
        self._last_round = -math.inf
        self._link: Link | None = None
        self._posting: Posting | None = None
        # A cell of its own for good: reads that have failed may write late.
        self._cell: list[int] | None = None

    @property
    def is_reading(self) -> bool:
        return self._link is not None

    @property
    def is_due(self) -> bool:
        return self._num_due > 0

    @property
    def _next_round(self) -> float:
        return self._last_round + ROUND_SECONDS * 2 ** (NUM_ROUNDS - self._num_due)

    def note_removal(self) -> None:
        self._num_due = NUM_ROUNDS if self._count else 0

    def poll(self, links: Sequence[Link]) -> Link | None:
        """Look at the read under way, or begin one over the youngest link, which is the last.

        Returns:
            A link that could not be read.
        """
        now = time.monotonic()
        if self._link is None and self._num_due and now >= self._next_round:
            self._last_round = now
            self._begin(links)
        if self._link is None:
            return None
        error = self._look()
        if error is None:
            return None
        link, self._link, self._posting = self._link, None, None
        link.drop()
        self._num_due -= not error
        return link if error else None

    def _begin(self, links: Sequence[Link]) -> None:
        link = next((one for one in reversed(links) if FENCES in one.tables), None)
        if link is None:
            return
        self._cell = self._cell or link.tables[FENCES].own.take()
        if self._cell is not None:
            self._link = link.hold()

    def _look(self) -> str | None:
        assert self._link is not None  # a read is under way or to be posted
        assert self._cell is not None
        try:
            if self._posting is None:
                fences, times = self._link.tables[FENCES], self._count
                read = fences.make_read(times * self._cell, times * [0])
                self._posting = Posting(self._agent, [read])
            return self._posting.look()
        except Exception as error:  # noqa: BLE001 NIXL raises many types; the peer cannot be read
            return str(error) or type(error).__name__
