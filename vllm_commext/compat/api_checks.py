"""Probes the API checks of `api_table`, in the installed vLLM or in another one's text."""

from dataclasses import dataclass
from enum import StrEnum

from vllm_commext.compat.api_probes import INSTALLED, Probe, View
from vllm_commext.compat.api_table import API_CHECKS, ApiCheck
from vllm_commext.compat.versions import is_at_least


class CheckState(StrEnum):
    """HOLDS: as we expect it. NOT_YET: this vLLM is older than the api. BROKEN: it differs."""

    HOLDS = "holds"
    NOT_YET = "not yet"
    BROKEN = "broken"


@dataclass(frozen=True)
class CheckOutcome:
    """What the probe of one API check found; `problem` is empty unless the API differs."""

    api: ApiCheck
    state: CheckState
    problem: str = ""


def guarded(probe: Probe, view: View = INSTALLED) -> str:
    """What the probe says is wrong; a probe that raises has found something wrong."""
    try:
        return probe(view)
    except Exception as error:  # noqa: BLE001 - what a foreign import raises is anybody's guess
        return f"{type(error).__name__}: {error}"


def check(api: ApiCheck, version: str, view: View = INSTALLED) -> CheckOutcome:
    """Probe one API check of the vLLM that calls itself `version`."""
    if not is_at_least(version, api.since):
        return CheckOutcome(api, CheckState.NOT_YET)
    problem = guarded(api.probe, view)
    return CheckOutcome(api, CheckState.BROKEN if problem else CheckState.HOLDS, problem)


def check_all(
    version: str, capability: str | None = None, view: View = INSTALLED
) -> tuple[CheckOutcome, ...]:
    """Probe every API check, or those of one capability."""
    wanted = (api for api in API_CHECKS if capability in (None, api.capability))
    return tuple(check(api, version, view) for api in wanted)
