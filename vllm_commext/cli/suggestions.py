"""What the doctor offers to switch on: what is off, could run on this machine, and was measured to
bring something on such a machine.  Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_commext.cli.report import Check, Level


@dataclass(frozen=True)
class Suggestion:
    """One capability that could be switched on.

    Attributes:
        capability: its name among the checks of the section ``capabilities``.
        line: what to put into the environment of ``vllm serve``.
        brings: what was measured, and on what.
        fits: whether a machine with these checks is such a machine.
    """

    capability: str
    line: str
    brings: str
    fits: Callable[[Sequence[Check]], bool]


def suggestions(checks: Sequence[Check]) -> list[Suggestion]:
    """The rows of `OFFERS` that are off and fit this machine."""
    off = {
        check.name
        for check in checks
        if check.section == "capabilities" and check.value.startswith("off")
    }
    return [one for one in OFFERS if one.capability in off and one.fits(checks)]


def _has(checks: Sequence[Check], section: str, name: str) -> bool:
    return any(
        (check.section, check.name, check.level) == (section, name, Level.OK) for check in checks
    )


def _native_queue(checks: Sequence[Check]) -> bool:
    return _has(checks, "package", "native queue")


def _peers(checks: Sequence[Check]) -> bool:
    """Two GPUs or more, and each reaches the memory of every other."""
    return _has(checks, "gpu", "peer access")


OFFERS = (
    Suggestion(
        "shm_queue",
        "VLLM_COMMEXT_SHM_QUEUE=1",
        "engine to workers: round trips of a SchedulerOutput 1.3x to 2.3x faster, and no process "
        "that spins while the engine is idle (on CPUs and H200)",
        _native_queue,
    ),
    Suggestion(
        "reduce_rms",
        "VLLM_COMMEXT_REDUCE_RMS=1",
        "tensor-parallel QK RMSNorm of MiniMax-M2 and OLMoE 1.27x to 1.76x faster (on 2 and 4 "
        "H200); other models are left alone",
        _peers,
    ),
    Suggestion(
        "allreduce",
        "VLLM_COMMEXT_ALLREDUCE=1",
        "tensor-parallel all-reduce 1.06x to 1.75x faster from 512 KiB or 2 MiB up (on 2 and 4 "
        "H200, without NVLink multicast)",
        _peers,
    ),
)
"""In the order in which they are offered; the figures are those of the README's tables."""
