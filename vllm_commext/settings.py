"""The toggles in one table.

The plugin reads them into a frozen `Settings` when vLLM loads it, and some capabilities read theirs
again when they start. A later capability needs one row more in `TOGGLES` and nothing else here.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_commext.errors import ConfigError

PREFIX = "VLLM_COMMEXT"
MASTER = "VLLM_COMMEXT"
STRICT = "VLLM_COMMEXT_STRICT"
UNTESTED = "VLLM_COMMEXT_UNTESTED"
ALIAS = "VLLM_COMMEXT_NIXL_ALIAS"
_BACKEND = "VLLM_COMMEXT_ALLREDUCE_BACKEND"
INSTALL_NIXL = "pip install nixl==1.5.1"
"""For messages: the release that is tested."""


@dataclass(frozen=True)
class Toggle:
    name: str  # of the environment variable
    field: str  # the key under which `Settings` holds its value
    choices: tuple[str, ...]
    default: str
    meaning: str  # for the generated documentation

    def problem(self, value: str) -> str:
        """Say that it has no such value; empty where it has."""
        if value in self.choices:
            return ""
        wanted = ", ".join(self.choices)
        return f"expected one of {wanted}, got {value!r}; unset it for the default, {self.default}"


SWITCH, AUTO = ("0", "1"), ("auto", "0", "1")
TOGGLES: tuple[Toggle, ...] = (
    Toggle(
        *(MASTER, "enabled", SWITCH, "1"),
        "`0` turns the whole package off: no capability is registered.",
    ),
    Toggle(
        *(STRICT, "strict", SWITCH, "0"),
        "`1` turns a capability that is refused or unverified at the start, a bad value or an "
        "unknown `VLLM_COMMEXT*` name into an error that stops vLLM.",
    ),
    Toggle(
        *(UNTESTED, "untested", ("self", "same", "off"), "self"),
        "What runs on an untested vLLM. `same`: parts whose vLLM functions read as in a tested "
        "one. `self`: also those that pass their own test. `off`: none.",
    ),
    Toggle(
        *("VLLM_COMMEXT_NIXL", "nixl", AUTO, "auto"),
        "The KV connector `CommextNixlConnector`. Without NIXL `auto` logs a warning, `1` an "
        "error.",
    ),
    Toggle(
        *(ALIAS, "nixl_alias", SWITCH, "0"),
        "`1` gives the KV connector the name `NixlConnector`, too, for launchers that allow no "
        "other; vLLM's own is then not available under that name.",
    ),
    Toggle(
        *("VLLM_COMMEXT_SHM_QUEUE", "shm_queue", AUTO, "auto"),
        "The message queue between the engine and its workers on one host. `auto` replaces "
        "vLLM's on a CPU vLLM, x86-64 or AArch64; `1` replaces it on GPUs, too. A queue with "
        "readers on other hosts is always vLLM's. Set it alike on all hosts.",
    ),
    Toggle(
        *("VLLM_COMMEXT_CPU_COLLECTIVES", "cpu_collectives", AUTO, "auto"),
        "All-reduce and all-gather of the tensor-parallel CPU workers of one host. `auto` and "
        "`1` use shared memory in place of Gloo where it is faster, `auto` on x86-64 and AArch64 "
        "alone.",
    ),
    Toggle(
        *("VLLM_COMMEXT_REDUCE_RMS", "reduce_rms", AUTO, "0"),
        "The op for MiniMax-M2's QK RMSNorm, whose rows tensor parallelism has sharded. `auto` "
        "serves where it was measured faster than vLLM's: bfloat16, CUDA graphs, 2 or 4 H200.",
    ),
    Toggle(
        *("VLLM_COMMEXT_REDUCE_RMS_TIMEOUT", "reduce_rms_timeout"),
        *(("1", "5", "10", "30", "60", "120", "300", "600"), "30"),
        "Seconds that the op waits for another rank before it fails; a failure ends the worker.",
    ),
    Toggle(
        *("VLLM_COMMEXT_ALLREDUCE", "allreduce", AUTO, "auto"),
        "The all-reduce of tensor parallelism, alone and with residual and norm. `auto` uses "
        "this package's kernels, with CUDA graphs on one host without NVLink multicast, where a "
        "table of `vllm-commext tune`, or the built-in one of two H100, ranks them first "
        "([conditions](allreduce.md#taking-part-by-itself)). `1` sends each message to the backend "
        "that was measured fastest, or logs why not.",
    ),
    Toggle(
        *(_BACKEND, "allreduce_backend"),
        *(("auto", "flashinfer_one_shot", "custom", "push", "nccl", "vllm"), "auto"),
        "`auto` chooses by measurement; a name forces one where vLLM fuses no norm; "
        "`vllm` keeps vLLM's.",
    ),
    Toggle(
        *("VLLM_COMMEXT_ALLREDUCE_TUNE", "allreduce_tune", ("cached", "0"), "cached"),
        "`cached` uses the results of `vllm-commext tune allreduce`, else a built-in table; "
        "`0` only a built-in table.",
    ),
    Toggle(
        *("VLLM_COMMEXT_BUILD_NATIVE", "build_native", AUTO, "auto"),
        "Used only while the package is built. `auto` leaves the native queue out where it "
        "cannot be compiled, `1` makes that an error, `0` does not try.",
    ),
)

_MULTICAST = "nothing of this package uses NVLink multicast; unset it"
GONE_VALUES: Mapping[tuple[str, str], str] = {
    (_BACKEND, "host"): "GPUs without peer access keep vLLM's own all-reduce; unset it",
    (_BACKEND, "flashinfer_two_shot"): "`push` is faster at every size; unset it",
    (_BACKEND, "flashinfer_mnnvl"): _MULTICAST,
    ("VLLM_COMMEXT_ALLREDUCE_TUNE", "startup"): (
        "run `vllm-commext tune allreduce --hidden SIZE` and unset it"
    ),
    ("VLLM_COMMEXT_ALLOW_MULTICAST", "1"): _MULTICAST,
}
"""Values that a toggle once had, and what to do instead."""


@dataclass(frozen=True)
class Settings:
    """The toggles' values as they stood when they were read, by `Toggle.field`."""

    values: Mapping[str, str]
    unknown: tuple[str, ...] = ()  # names that begin as ours do and are no toggle

    def __getitem__(self, field: str) -> str:
        return self.values[field]

    @property
    def enabled(self) -> bool:
        return self["enabled"] == "1"


def unknown_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names in `environ` that begin with our prefix and belong to no toggle, sorted."""
    known = {toggle.name for toggle in TOGGLES}
    return tuple(sorted(name for name in environ if name.startswith(PREFIX) and name not in known))


def describe_unknown(name: str) -> str:
    """One line about a name that is no toggle: what is near to it, and what there is."""
    known = [toggle.name for toggle in TOGGLES]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{name} is no toggle of vllm_commext{hint}; the toggles are {', '.join(known)}"


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every toggle; ConfigError names all that have a value which is not among their choices.

    Where the package is turned off as a whole, no other toggle can matter, so none is checked.
    """
    values = {toggle.field: toggle.default for toggle in TOGGLES}
    if environ.get(MASTER) == "0":
        values["enabled"] = "0"
        return Settings(MappingProxyType(values))
    gone = {name: value for name, value in environ.items() if (name, value) in GONE_VALUES}
    errors = [f"{name}={value} is gone: {GONE_VALUES[name, value]}" for name, value in gone.items()]
    for toggle in TOGGLES:
        value = environ.get(toggle.name, toggle.default)
        if toggle.name not in gone and (problem := toggle.problem(value)):
            errors.append(f"{toggle.name}: {problem}")
        values[toggle.field] = value
    if errors:
        raise ConfigError("; ".join(errors))
    return Settings(MappingProxyType(values), unknown_names(environ))
