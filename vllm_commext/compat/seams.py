"""Probes the seams of `seam_table`, in the installed vLLM or in another one's text."""

from dataclasses import dataclass
from enum import Enum

from vllm_commext.compat.seam_probes import INSTALLED, Probe, View
from vllm_commext.compat.seam_table import SEAMS, Seam
from vllm_commext.compat.versions import is_at_least


class SeamState(str, Enum):
    """HOLDS: as we expect it. NOT_YET: this vLLM is older than the seam. BROKEN: it differs."""

    HOLDS = "holds"
    NOT_YET = "not yet"
    BROKEN = "broken"


@dataclass(frozen=True)
class SeamOutcome:
    """What the probe of one seam found; `problem` is empty unless the seam is broken."""

    seam: Seam
    state: SeamState
    problem: str = ""


def guarded(probe: Probe, view: View = INSTALLED) -> str:
    """What the probe says is wrong; a probe that raises has found something wrong."""
    try:
        return probe(view)
    except Exception as error:  # noqa: BLE001 - what a foreign import raises is anybody's guess
        return f"{type(error).__name__}: {error}"


def check(seam: Seam, version: str, view: View = INSTALLED) -> SeamOutcome:
    """Probe one seam of the vLLM that calls itself `version`."""
    if not is_at_least(version, seam.since):
        return SeamOutcome(seam, SeamState.NOT_YET)
    problem = guarded(seam.probe, view)
    return SeamOutcome(seam, SeamState.BROKEN if problem else SeamState.HOLDS, problem)


def check_all(
    version: str, capability: str | None = None, view: View = INSTALLED
) -> tuple[SeamOutcome, ...]:
    """Probe every seam, or those of one capability."""
    wanted = (seam for seam in SEAMS if capability in (None, seam.capability))
    return tuple(check(seam, version, view) for seam in wanted)
