"""The one registration point: what vLLM calls in each of its processes.

`register` is cheap and may be called again. It never raises, because an exception in a plugin stops
vLLM, with one exception that the user asks for: ``VLLM_COMMEXT_STRICT=1``.
"""

import importlib
import importlib.util
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_commext import status
from vllm_commext.errors import (
    ConfigError,
    OtherPlatformError,
    UnprovenHereError,
    UnsupportedError,
    UntestedError,
)
from vllm_commext.settings import (
    ALIAS,
    INSTALL_NIXL,
    MASTER,
    STRICT,
    TOGGLES,
    Settings,
    describe_unknown,
    read_settings,
)
from vllm_commext.status import CapabilityStatus, State

logger = logging.getLogger("vllm.commext.plugin")

CONNECTOR_NAME = "CommextNixlConnector"
VLLMS_NAME = "NixlConnector"
CONNECTOR_MODULE = "vllm_commext.nixl.connector"

_lock = threading.Lock()


@dataclass(frozen=True)
class Capability:
    """One row of the capabilities that this package can bring into vLLM.

    Attributes:
        name: in the log, in `compat.parts`, and the `Toggle.field` of its toggle.
        refuse: called where it is refused, so that asking for it by name tells why.
        fallback: of the user where it is refused.
        proof: function of `compat.fits`: on machines where it raises, `auto` is off, without a
            warning. Empty for all.
    """

    name: str
    activate: Callable[[], None]
    refuse: Callable[[], None]
    fallback: str
    proof: str = ""


def _activate_nixl() -> None:
    from vllm_commext.compat import hooks, kv_connector

    if importlib.util.find_spec("nixl") is None:
        raise UnsupportedError(f"NIXL is not installed, `{INSTALL_NIXL}` brings it")
    kv_connector.note_layout_choice()
    hooks.when_imported(CONNECTOR_MODULE, _watch_for_outputs)
    _add_connector(CONNECTOR_MODULE)


def _watch_for_outputs() -> None:
    """The engine has our connector, so its API server may get answers that began elsewhere."""
    from vllm_commext.compat import hooks

    def install() -> None:
        from vllm_commext.compat import resumed_answers

        resumed_answers.install()

    hooks.when_imported("vllm.v1.engine.output_processor", install)


def _add_connector(module: str) -> None:
    """Under its name and, where that is wanted, under the one of vLLM's: also a refused one, so
    that vLLM's never serves in its place unseen."""
    from vllm_commext.compat import hooks

    names = (CONNECTOR_NAME, VLLMS_NAME) if os.environ.get(ALIAS) == "1" else (CONNECTOR_NAME,)
    for name in names:
        hooks.add_connector(name, module, CONNECTOR_NAME)


def __getattr__(name: str) -> Any:
    """Stand in for a connector that was refused: vLLM would call its name unknown, and the reason
    would be lost in the log."""
    if name != CONNECTOR_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refused = status.find("nixl")
    reason = refused.reason if refused else "it was not registered in this process"
    raise UnsupportedError(f"{name} was asked for by name and cannot run: {reason}")


RINGS, KERNELS = "require_proven_machine", "require_proven_gpus"


def _installed(name: str, fallback: str, proof: str) -> Capability:
    """A capability that the module of that name in `compat` puts in place; no user names it."""

    def install() -> None:
        from vllm_commext.compat import fits

        if proof == RINGS:
            fits.require_extension()
        importlib.import_module(f"vllm_commext.compat.{name}").install()

    return Capability(name, install, lambda: None, fallback, proof)


CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "nixl", _activate_nixl, lambda: _add_connector(__name__), "vLLM's own connectors remain"
    ),
    _installed("shm_queue", "vLLM's own queue remains", RINGS),
    _installed("cpu_collectives", "vLLM's own remain", RINGS),
    _installed("reduce_rms", "vLLM's own norm remains", KERNELS),
    _installed("allreduce", "vLLM's default dispatch remains", KERNELS),
)


def _refused(capability: Capability, reason: str, required: bool) -> CapabilityStatus:
    try:
        capability.refuse()
    except Exception as error:  # noqa: BLE001 - the refusal itself must still be told
        logger.debug("commext: %s leaves no stand-in: %s", capability.name, error)
    return CapabilityStatus(
        capability.name, State.REFUSED, reason, capability.fallback, required=required
    )


def _decide(capability: Capability, settings: Settings) -> CapabilityStatus:
    choice = settings[capability.name]
    toggle = next(toggle for toggle in TOGGLES if toggle.field == capability.name)
    is_default = toggle.name not in os.environ
    if choice == "0":
        reason = f"{toggle.name}=0"
        return CapabilityStatus(capability.name, State.OFF, reason, is_quiet=is_default)
    try:
        from vllm_commext.compat import fits

        if choice == "auto" and capability.proof:
            getattr(fits, capability.proof)()
        remark = fits.admit(capability.name)
        capability.activate()
    except UnprovenHereError as error:
        is_quiet = is_default and isinstance(error, OtherPlatformError)
        reason = f"{toggle.name}=auto: {error}"
        return CapabilityStatus(capability.name, State.OFF, reason, is_quiet=is_quiet)
    except UnsupportedError as error:
        if isinstance(error, UntestedError) and choice == "auto" and capability.proof:
            reason = f"{toggle.name}=auto: {error}"
            return CapabilityStatus(capability.name, State.OFF, reason, is_untested=True)
        return _refused(capability, str(error), required=choice == "1")
    except Exception as error:  # noqa: BLE001 - one capability's fault must not stop vLLM
        reason = f"{type(error).__name__}: {error}"
        return _refused(capability, reason, required=choice == "1")
    return CapabilityStatus(capability.name, State.ACTIVE, remark)


def _tell_untested() -> None:
    """One line a server about a vLLM that no test was run on, part by part."""
    if multiprocessing.parent_process() is not None:
        return
    from vllm_commext.compat import fits

    wanted = [one for one in status.recorded() if one.state is not State.OFF or one.is_untested]
    line, level = fits.summary([one.name for one in wanted])
    if line:
        status.tell(level, line)


def _add_toggles() -> None:
    """Enter our toggles into vLLM; where we are turned off, only those that the user has set.

    A name that the user has set must be known even then: vLLM can be told to stop at others.
    """
    from vllm_commext.compat import hooks

    turned_off = os.environ.get(MASTER) == "0"
    wanted = [toggle for toggle in TOGGLES if not turned_off or toggle.name in os.environ]
    try:
        hooks.add_toggles(wanted)
    except Exception as error:  # noqa: BLE001 - without it vLLM only warns about the names
        logger.warning("commext: could not register VLLM_COMMEXT_* variables with vLLM: %s", error)


def _register() -> list[str]:
    """Record an outcome for every capability; returns what a strict user must hear of."""
    _add_toggles()
    try:
        settings = read_settings()
    except ConfigError as error:
        for capability in CAPABILITIES:
            status.record(_refused(capability, str(error), required=True))
        return [str(error)]
    if not settings.enabled:
        for capability in CAPABILITIES:
            status.record(CapabilityStatus(capability.name, State.OFF, f"{MASTER}=0"))
        return []
    problems = [describe_unknown(name) for name in settings.unknown]
    for problem in problems:
        logger.warning("commext: %s", problem)
    for capability in CAPABILITIES:
        outcome = _decide(capability, settings)
        status.record(outcome)
        if outcome.state is State.REFUSED or (outcome.state is State.ACTIVE and outcome.reason):
            problems.append(outcome.line())
    _tell_untested()
    return problems


def register() -> None:
    """Register every capability whose toggle is on; vLLM calls this in each process.

    Raises:
        UnsupportedError: only under ``VLLM_COMMEXT_STRICT=1``; see `settings.TOGGLES`.
    """
    with _lock:
        if status.recorded():
            return
        try:
            problems = _register()
        except Exception as error:
            logger.exception("commext: the registration failed; vLLM goes on without it")
            problems = [f"the registration failed ({type(error).__name__}: {error})"]
    if problems and os.environ.get(STRICT) == "1":
        raise UnsupportedError(f"{STRICT}=1: " + "; ".join(problems))
