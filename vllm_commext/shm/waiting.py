"""What of vLLM's ways to wait is visible to others."""

import os


def warning_interval() -> float:
    """Seconds after which, and between, the lines about a long wait."""
    return float(os.environ.get("VLLM_RINGBUFFER_WARNING_INTERVAL", "60"))


class SpinCondition:
    """How vLLM's readers wait, as far as others look at it. The ring adapts by itself, so nothing
    here has an effect.
    """

    def __init__(self) -> None:
        self.last_read = 0.0
        self.busy_loop_s = 0.0
        self.poller = None
