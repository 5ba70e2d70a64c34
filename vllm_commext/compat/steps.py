"""vLLM's classes of what the engine and its workers send one another in each step."""

import functools
import logging

from vllm_commext.shm.steps import StepClasses

logger = logging.getLogger("vllm.commext.shm")


@functools.cache
def vllm_steps() -> StepClasses | None:
    """None, and a line that says why, where they differ from what the codec was made for."""
    try:
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
        from vllm.v1.executor.multiproc_executor import WorkerProc
        from vllm.v1.outputs import ModelRunnerOutput

        status = WorkerProc.ResponseStatus
        kinds = SchedulerOutput, NewRequestData, CachedRequestData, ModelRunnerOutput
        found = StepClasses(*kinds, status)
        problem = found.problem()
    except (ImportError, AttributeError) as error:
        found, problem = None, str(error)
    if problem:
        logger.info("commext: shm_queue: steps are pickled as they are: %s", problem)
        return None
    return found
