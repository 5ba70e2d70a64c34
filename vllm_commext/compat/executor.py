"""vLLM's multiprocess executor with our message queue, to be named where no toggle is set.

    vllm serve ... --distributed-executor-backend \\
        vllm_commext.compat.executor.CommextMultiprocExecutor

It sets the toggle for the workers that it starts, so all ends of its queues are ours.
"""

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_commext.plugin import activate

TOGGLE = "VLLM_COMMEXT_SHM_QUEUE"


class CommextMultiprocExecutor(MultiprocExecutor):
    """`MultiprocExecutor`, whose queues stop the server if they cannot be ours."""

    def _init_executor(self) -> None:
        os.environ[TOGGLE] = "1"
        activate("shm_queue")
        super()._init_executor()
