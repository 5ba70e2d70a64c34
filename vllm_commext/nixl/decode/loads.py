"""Loads under way on one worker: each is read in parts, one for each prefill rank involved.

Pure.  A load ends when all of its parts have: blocks into which a part is still being read must
not be given to anybody else, even if another part has failed.  A load that took too long is given
up: it counts as failed at once, and as settled when its last part has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vllm_commext.errors import CommextError
from vllm_commext.nixl.requests import Load, RemoteRequest


@dataclass
class Part:
    """What one load has to do with one prefill rank.

    Attributes:
        load: the load.
        remote: where its blocks are.
        source: the prefill rank.
        num_consumers: decode ranks that the prefill rank waits for.
        reads: there may be something to read; otherwise the rank is only released.
        retried: it was tried before, with a peer that turned out to be gone.
        begun: when the load began, in seconds of ``time.perf_counter``.
    """

    load: Load
    remote: RemoteRequest
    source: int
    num_consumers: int
    reads: bool
    retried: bool = False
    begun: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Failure:
    """Why a load failed: one of ``recorder.FAILURE_REASONS`` and the error."""

    reason: str
    error: CommextError


@dataclass(frozen=True)
class Ended:
    """How a load ended.

    Attributes:
        failure: why it failed, None where it did not.
        given_up: it had been reported as failed before, and is settled now.
    """

    failure: Failure | None
    given_up: bool


@dataclass
class _State:
    load: Load
    num_open: int
    failure: Failure | None = None
    given_up: bool = False


class LoadBook:
    """Loads by request id."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def __len__(self) -> int:
        """Loads with parts under way."""
        return len(self._states)

    def begin(self, load: Load, num_parts: int) -> None:
        """A load begins."""
        self._states[load.request_id] = _State(load, num_parts)

    def has_failed(self, load: Load) -> bool:
        """Whether nothing more need be read for it."""
        state = self._states.get(load.request_id)
        return state is None or state.failure is not None

    def close(self, part: Part, failure: Failure | None = None) -> Ended | None:
        """A part has ended; tells what that means where it was the last one."""
        request_id = part.load.request_id
        state = self._states[request_id]
        state.num_open -= 1
        state.failure = state.failure or failure
        if state.num_open:
            return None
        del self._states[request_id]
        return Ended(state.failure, state.given_up)

    def give_up(self, request_id: str, failure: Failure) -> Load | None:
        """Count a load as failed now; None where it has ended."""
        state = self._states.get(request_id)
        if state is None:
            return None
        state.failure = state.failure or failure
        state.given_up = True
        return state.load
