"""The probes of the seams, against small modules made here; vLLM's own are in tests/contract."""

import abc
import dataclasses
import enum
import sys
import types
from typing import Any

import pytest

from vllm_commext.compat import rebind, seam_probes, seams
from vllm_commext.compat.seams import Seam, SeamState

MODULE = "commext_seam_example"


class Base(abc.ABC):
    def __init__(self, config: str, role: int) -> None:
        self.config, self.role = config, role

    @abc.abstractmethod
    def load(self, request: str, **kwargs: Any) -> None: ...

    @abc.abstractmethod
    def save(self) -> None: ...

    @classmethod
    def build(cls, data: dict[str, int] | None = None) -> str:
        return f"{cls} {data}"


@dataclasses.dataclass
class Record:
    first: int
    second: int = 2


class Color(enum.Enum):
    RED = 1


@pytest.fixture(autouse=True)
def _example(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(MODULE)
    vars(module).update(Base=Base, Record=Record, Color=Color, table={"a": int}, number=1)
    monkeypatch.setitem(sys.modules, MODULE, module)


def at(name: str) -> str:
    return f"{MODULE}:{name}"


HOLD = {
    "exists": seam_probes.exists(at("Base.load"), at("Color.RED")),
    "constructor": seam_probes.takes(at("Base.__init__"), "config", "role"),
    "kwargs beyond": seam_probes.takes(at("Base.load"), "request"),
    "no arguments": seam_probes.takes(at("Base.save")),
    "classmethod": seam_probes.takes(at("Base.build"), "data"),
    "default beyond": seam_probes.takes(at("Base.build")),
    "fields": seam_probes.has_fields(at("Record"), "second", "first"),
    "methods": seam_probes.has_methods(at("Base"), {"load": ("request",), "build": ("data",)}),
    "abstract": seam_probes.abstract_only(
        at("Base"), {"load": ("request",), "save": (), "build": ()}
    ),
    "mapping": seam_probes.maps_to_callables(at("table")),
    "not installed": seam_probes.where_installed(
        "commext_no_such_package", seam_probes.exists(at("gone"))
    ),
}
BREAK = {
    "no module": (seam_probes.exists("commext_no_such_module:x"), "ModuleNotFoundError"),
    "installed": (
        seam_probes.where_installed("json", seam_probes.exists(at("gone"))),
        "AttributeError",
    ),
    "no name": (seam_probes.exists(at("Base.gone")), "AttributeError"),
    "renamed argument": (seam_probes.takes(at("Base.load"), "req"), "found (request, kwargs)"),
    "order": (seam_probes.takes(at("Base.__init__"), "role", "config"), "found (config, role)"),
    "one more needed": (seam_probes.takes(at("Base.__init__"), "config"), "found (config, role)"),
    "one fewer": (
        seam_probes.takes(at("Base.save"), "layer"),
        "expected parameters (layer), found ()",
    ),
    "field": (seam_probes.has_fields(at("Record"), "first", "third"), "expected fields third"),
    "method": (seam_probes.has_methods(at("Base"), {"gone": ()}), "gone: it is not there"),
    "abstract": (seam_probes.abstract_only(at("Base"), {"save": ()}), "beyond ours, found load"),
    "no dict": (seam_probes.maps_to_callables(at("number")), "expected a dict, found int"),
}


@pytest.mark.parametrize("name", HOLD)
def test_a_probe_holds(name: str) -> None:
    outcome = seams.check(Seam(name, "nixl", "", HOLD[name]), "0.32.0")
    assert (outcome.state, outcome.problem) == (SeamState.HOLDS, "")


@pytest.mark.parametrize("name", BREAK)
def test_a_probe_says_what_it_expected_and_found(name: str) -> None:
    probe, expected = BREAK[name]
    outcome = seams.check(Seam(name, "nixl", "", probe), "0.32.0")
    assert outcome.state is SeamState.BROKEN
    assert expected in outcome.problem


def test_a_seam_is_not_probed_before_the_release_that_brought_it() -> None:
    seam = Seam("new", "nixl", "", BREAK["no name"][0], since="0.30")
    assert seams.check(seam, "0.29.0").state is SeamState.NOT_YET
    assert seams.check(seam, "0.30.0").state is SeamState.BROKEN


def test_the_table_is_sound() -> None:
    names = [seam.name for seam in seams.SEAMS]
    assert len(set(names)) == len(names)
    assert all(seam.why for seam in seams.SEAMS)


def test_attributes_are_those_that_the_methods_set() -> None:
    probe = seam_probes.has_attributes(f"{__name__}:Made", "here", "later")
    assert (
        seam_probes.has_attributes(f"{__name__}:Made", "here", "annotated")(seam_probes.INSTALLED)
        == ""
    )
    assert "later" in probe(seam_probes.INSTALLED)


class Made:
    def __init__(self) -> None:
        self.here = 1
        self.annotated: int = 2
        print(self.here)  # noqa: T201 - what is only read is not set


def test_a_probe_looks_behind_what_we_have_put_there() -> None:
    class Ours:
        def load(self, other: str) -> None: ...

    rows = [rebind.Rebinding(at(name), "", "", "", "") for name in ("Base.save", "Base")]
    for row, ours in zip(rows, (lambda self, more: None, Ours), strict=True):
        rebind.rebind(row, ours)
    probe = seam_probes.has_methods(at("Base"), {"load": ("request",), "save": ()})
    problem = probe(seam_probes.INSTALLED)
    for row in reversed(rows):
        rebind.restore(row)
    assert problem == ""
