"""An engine that only waits for the connector sleeps until something ends or arrives.

vLLM goes on stepping, a thousand times a second, while a connector keeps the blocks of finished
requests or loads those of waiting ones: it costs two thirds of a core, and what has ended is found
a step and a pause later. There is no hook for it. `install` patches the engine's step: where no
request can be computed, it first waits for the connector's wakeup socket or the engine's own queue.
What the connector has to do before a step (`first_token`) is done there too, and that alone beside
other connectors of a ``MultiConnector``, which may have work of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_commext.compat import fits
from vllm_commext.compat.monkey_patch import is_patched, original_of, wrap

if TYPE_CHECKING:
    from vllm_commext.nixl.scheduler import SchedulerSide
    from vllm_commext.nixl.wakeup import WakeupSocket

PART = "engine step"
SYMBOL = "vllm.v1.engine.core:EngineCoreProc._process_engine_step"
FLUSH_STEPS = 3
"""Steps without tokens that bring the workers what the scheduler has to say and the scheduler what
they have to say, also where vLLM keeps two steps under way.  It keeps one for each pipeline stage
and one more."""

Step = Callable[[Any], bool]


def stock_step() -> Step:
    return original_of(SYMBOL)


def install() -> None:
    """Monkey-patch the step of this process's engine; UnsupportedError where it does not fit."""
    if not is_patched(SYMBOL):
        fits.admit(PART)
        wrap({SYMBOL: _waiting})


def _waiting(process: Step) -> Step:
    def process_engine_step(core: Any) -> bool:
        connector = getattr(core.scheduler, "connector", None)
        wait: EngineWait | None = getattr(connector, "engine_wait", None)
        if wait is not None:
            return wait.step(core, process)
        for child in getattr(connector, "_connectors", ()):  # of a MultiConnector
            if (wait := getattr(child, "engine_wait", None)) is not None:
                wait.before_step(core)
        return process(core)

    return process_engine_step


class EngineWait:
    """Waits on an engine's thread before its steps. *before_step* is called first and after each
    notification of the workers, with the engine."""

    def __init__(
        self,
        wakeup: WakeupSocket,
        waiter: SchedulerSide,
        before_step: Callable[[Any], None] = lambda core: None,
    ) -> None:
        self._wakeup = wakeup
        self._waiter = waiter
        self.before_step = before_step
        self._num_quiet_steps = 0

    def step(self, core: Any, process: Step) -> bool:
        """Take the engine's step, after a wait where there is nothing to compute; none where a
        request or a command has arrived meanwhile, which the engine looks at first.

        *core* is vLLM's ``EngineCoreProc``, *process* its step: it says whether the model was run.
        """
        self.before_step(core)
        if not self._has_nothing_to_compute(core):
            self._num_quiet_steps = 0
            return process(core)
        num_flushing = max(FLUSH_STEPS, core.batch_queue_size + 1)
        if self._num_quiet_steps >= num_flushing:
            if self._wakeup.wait(core.input_queue):
                self._num_quiet_steps = 0
                self.before_step(core)
            if not core.input_queue.empty():
                return False
        self._num_quiet_steps += 1
        return process(core) if self._num_quiet_steps > num_flushing else _at_once(core, process)

    def _has_nothing_to_compute(self, core: Any) -> bool:
        """All requests are finished ones whose blocks are kept, or wait for a load."""
        scheduler = core.scheduler
        if scheduler.running or scheduler.finished_req_ids or not scheduler.requests:
            return False
        if core.engines_running or getattr(scheduler, "ec_connector", None) is not None:
            return False
        return not self._waiter.has_news() and all(
            request.is_finished() or self._waiter.is_loading(request.request_id)
            for request in scheduler.requests.values()
        )


def _at_once(core: Any, process: Step) -> bool:
    """The engine's step without the millisecond that vLLM pauses after one without tokens; where
    more depends on whether the model was run, the step as it is."""
    if getattr(core, "check_for_draft_tokens", False) or hasattr(core, "dp_group"):
        return process(core)
    step = core.step_fn
    core.step_fn = lambda: (step()[0], True)
    try:
        return process(core)
    finally:
        core.step_fn = step
