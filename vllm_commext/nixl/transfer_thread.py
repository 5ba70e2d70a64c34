"""The one thread that owns a worker's NIXL agent.

Handshakes, reads, polling and notifications all happen here, so that the engine's thread never
waits for them: it submits small commands and takes outcomes, once a step.
"""

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.decode.links import Link, LocalWorker
from vllm_commext.nixl.decode.loader import Loader
from vllm_commext.nixl.log import RateLimitedLog, logger
from vllm_commext.nixl.prefill.leases import LeaseManager
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.requests import CompletionQueue, Hold, Load, Release, Wait
from vllm_commext.nixl.stream.progress import Publisher
from vllm_commext.nixl.transport.agent import NixlAgent, ucx_log

BUSY_WAIT_SECONDS = 20e-6  # first wait between two looks at reads under way
WAIT_GROWTH = 1.25
"""From one wait to the next while nothing changes: an end is noticed within a quarter of the time
that the read took."""
PENDING_WAIT_SECONDS = 1e-3
LEASED_WAIT_SECONDS = 5e-3
"""Between two looks for releases, where blocks are held and nothing else is under way; each costs
some 0.1 ms, most of it for waking up."""
DUTY_WAIT_SECONDS = 0.1
IDLE_WAIT_SECONDS = 1.0
"""Each look of an idle thread costs some 0.2 ms: its core has to wake up for it."""
GAUGE_SECONDS = 0.1
STOP_SECONDS = 5.0
_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS = 29, 1000


@dataclass(frozen=True)
class GiveUp:
    """The scheduler has taken a late load's blocks out of use: report it as failed now."""

    request_id: str


@dataclass(frozen=True)
class Look:
    """Something was launched whose end is to be noticed soon: begin to look."""


@dataclass(frozen=True)
class Renew:
    """Turn heartbeats on or off: a paused engine has nothing kept."""

    is_on: bool


def wait_precisely() -> None:
    """Have the calling thread's waits end when they should: Linux lets them last 50 us longer, as
    long as the shortest of them again."""
    with contextlib.suppress(OSError, AttributeError):
        slack = ctypes.c_ulong(_SLACK_NANOSECONDS)
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, slack, 0, 0, 0)


T = TypeVar("T")
Command = Load | Wait | Hold | Release | GiveUp | Look | Renew


class TransferThread:
    """Runs one worker's transfers.

    Args:
        on_start: called once in the thread, before anything else (selects the GPU).
        publisher: says what has been computed of prompts that are read meanwhile; None where none
            are.
    """

    def __init__(
        self,
        agent: NixlAgent,
        config: ConnectorConfig,
        local: LocalWorker,
        recorder: TransferRecorder,
        on_start: Callable[[], None] = lambda: None,
        probe: Callable[[Link], Generator[None]] | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        self._agent = agent
        self._publisher = publisher
        self._mapper = local.mapper
        self._on_start = on_start
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.outcomes = CompletionQueue()
        self._loader = Loader(agent, config, local, recorder, self.outcomes, probe)
        self._lease_manager = LeaseManager(agent, local.tables, config, recorder, self.outcomes)
        self._wait_seconds = IDLE_WAIT_SECONDS
        self._next_turn = 0.0
        self._recorder = recorder
        self._source = f"worker {local.layout.worker}"
        self._next_gauges = 0.0
        self._log = RateLimitedLog()
        self._thread = threading.Thread(target=self._run, name="commext-transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._commands.put(None)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the transfer thread did not end within %g s", STOP_SECONDS)

    def _run(self) -> None:
        wait_precisely()
        try:
            self._on_start()
        except Exception as error:  # noqa: BLE001 whatever it is, each load fails with it
            logger.exception("the transfer thread could not be set up; no load will be tried")
            self._loader.uses.refusal = error
        while self._guard("commands", self._take_commands, lost=True):
            if time.monotonic() < self._next_turn:
                self._guard("notifications", self._lease_manager.take_notifications, lost=None)
            else:
                self._turn()
        self._guard("close", self._close, lost=None)

    def _turn(self) -> None:
        if self._publisher is not None:
            self._guard("chunks", self._publisher.poll, lost=None)
        progressed = self._guard("loads", self._loader.poll, lost=False)
        self._guard("notifications", self._lease_manager.take_notifications, lost=None)
        self._guard("leases", self._lease_manager.end_leases, lost=None)
        under_way = self._wait_under_way(progressed)
        # Releases are to be heard of at once; all else has time where blocks are only held.
        only_holds = under_way is None and len(self._lease_manager) > 0
        at_rest = self._wait_at_rest()
        self._wait_seconds = at_rest if under_way is None else min(under_way, at_rest)
        self._next_turn = time.monotonic() + DUTY_WAIT_SECONDS if only_holds else 0.0
        self._guard("gauges", self._note_gauges, lost=None)
        if only_holds or self._wait_seconds >= DUTY_WAIT_SECONDS:
            self._guard("ucx log", ucx_log.flush, lost=None)

    def _guard(self, what: str, step: Callable[[], T], lost: T) -> T:
        try:
            return step()
        except Exception:  # noqa: BLE001 the thread outlives any fault; logged with its trace
            self._log.exception(what, f"transfer thread: iteration failed ({what}), continuing")
            time.sleep(PENDING_WAIT_SECONDS)
            return lost

    def _note_gauges(self) -> None:
        now = time.monotonic()
        if now >= self._next_gauges or self._wait_seconds >= DUTY_WAIT_SECONDS:
            self._next_gauges = now + GAUGE_SECONDS
            self._recorder.gauges(self._source, self._loader.gauges())

    def _wait_under_way(self, progressed: bool) -> float | None:
        if self._loader.num_reads:
            if progressed or self._wait_seconds > PENDING_WAIT_SECONDS:
                return BUSY_WAIT_SECONDS
            return min(WAIT_GROWTH * self._wait_seconds, PENDING_WAIT_SECONDS)
        if self._loader.client.asking or len(self._publisher or ()):
            return PENDING_WAIT_SECONDS
        streams = self._loader.streams
        return streams.seconds_to_look() if len(streams) else None

    def _wait_at_rest(self) -> float:
        if len(self._lease_manager):
            return LEASED_WAIT_SECONDS
        return DUTY_WAIT_SECONDS if self._loader.has_duties else IDLE_WAIT_SECONDS

    def _take_commands(self) -> bool:
        try:
            command = self._commands.get(timeout=self._wait_seconds)
            while command is not None:
                self._next_turn = 0.0
                self._execute(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _execute(self, command: Command) -> None:
        if isinstance(command, Load):
            self._loader.begin(command)
        elif isinstance(command, Wait):
            self._loader.uses.wait(command)
        elif isinstance(command, GiveUp):
            self._loader.give_up(command.request_id)
        elif isinstance(command, Hold):
            self._lease_manager.hold(command)
        elif isinstance(command, Release):
            self._lease_manager.release(command.request_id)
        elif isinstance(command, Renew):
            self._loader.uses.keep_alive.is_on = command.is_on

    def _close(self) -> None:
        """No agent is taken down under a read: that could end the peer's process."""
        deadline = time.monotonic() + STOP_SECONDS / 2
        self._loader.streams.end_all()
        while self._loader.num_reads and time.monotonic() < deadline:
            self._loader.poll_reads()
            time.sleep(PENDING_WAIT_SECONDS)
        if self._loader.num_reads:
            logger.warning("%d reads are still under way at the end", self._loader.num_reads)
            return
        self._loader.close()
        if self._mapper is not None:
            self._mapper.close()
        self._agent.close()
