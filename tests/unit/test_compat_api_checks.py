"""The probes of API checks, against small modules made here; vLLM's own are in tests/contract."""

import abc
import dataclasses
import enum
import sys
import types
from typing import Any

import pytest

from vllm_commext.compat import api_checks, api_probes, monkey_patch
from vllm_commext.compat.api_probes import ApiCheck, CheckState

MODULE = "commext_api_example"


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
    "exists": api_probes.exists(at("Base.load"), at("Color.RED")),
    "constructor": api_probes.takes(at("Base.__init__"), "config", "role"),
    "kwargs beyond": api_probes.takes(at("Base.load"), "request"),
    "no arguments": api_probes.takes(at("Base.save")),
    "classmethod": api_probes.takes(at("Base.build"), "data"),
    "default beyond": api_probes.takes(at("Base.build")),
    "fields": api_probes.has_fields(at("Record"), "second", "first"),
    "methods": api_probes.has_methods(at("Base"), {"load": ("request",), "build": ("data",)}),
    "abstract": api_probes.abstract_only(
        at("Base"), {"load": ("request",), "save": (), "build": ()}
    ),
    "mapping": api_probes.maps_to_callables(at("table")),
    "not installed": api_probes.where_installed(
        "commext_no_such_package", api_probes.exists(at("gone"))
    ),
}
BREAK = {
    "no module": (api_probes.exists("commext_no_such_module:x"), "ModuleNotFoundError"),
    "installed": (
        api_probes.where_installed("json", api_probes.exists(at("gone"))),
        "AttributeError",
    ),
    "no name": (api_probes.exists(at("Base.gone")), "AttributeError"),
    "renamed argument": (api_probes.takes(at("Base.load"), "req"), "found (request, kwargs)"),
    "order": (api_probes.takes(at("Base.__init__"), "role", "config"), "found (config, role)"),
    "one more needed": (api_probes.takes(at("Base.__init__"), "config"), "found (config, role)"),
    "one fewer": (
        api_probes.takes(at("Base.save"), "layer"),
        "expected parameters (layer), found ()",
    ),
    "field": (api_probes.has_fields(at("Record"), "first", "third"), "expected fields third"),
    "method": (api_probes.has_methods(at("Base"), {"gone": ()}), "gone: it is not there"),
    "abstract": (api_probes.abstract_only(at("Base"), {"save": ()}), "beyond ours, found load"),
    "no dict": (api_probes.maps_to_callables(at("number")), "expected a dict, found int"),
}


@pytest.mark.parametrize("name", HOLD)
def test_a_probe_holds(name: str) -> None:
    outcome = api_probes.check(ApiCheck(name, "nixl", "", HOLD[name]), "0.32.0")
    assert (outcome.state, outcome.problem) == (CheckState.HOLDS, "")


@pytest.mark.parametrize("name", BREAK)
def test_a_probe_says_what_it_expected_and_found(name: str) -> None:
    probe, expected = BREAK[name]
    outcome = api_probes.check(ApiCheck(name, "nixl", "", probe), "0.32.0")
    assert outcome.state is CheckState.BROKEN
    assert expected in outcome.problem


def test_an_api_check_is_not_probed_before_the_release_that_brought_it() -> None:
    api = ApiCheck("new", "nixl", "", BREAK["no name"][0], since="0.30")
    assert api_probes.check(api, "0.29.0").state is CheckState.NOT_YET
    assert api_probes.check(api, "0.30.0").state is CheckState.BROKEN


def test_the_table_is_sound() -> None:
    names = [api.name for api in api_checks.API_CHECKS]
    assert len(set(names)) == len(names)
    assert all(api.why for api in api_checks.API_CHECKS)


def test_attributes_are_those_that_the_methods_set() -> None:
    probe = api_probes.has_attributes(f"{__name__}:Made", "here", "later")
    assert (
        api_probes.has_attributes(f"{__name__}:Made", "here", "annotated")(api_probes.INSTALLED)
        == ""
    )
    assert "later" in probe(api_probes.INSTALLED)


class Made:
    def __init__(self) -> None:
        self.here = 1
        self.annotated: int = 2
        print(self.here)  # noqa: T201 - what is only read is not set


def test_a_probe_looks_behind_what_we_have_put_there() -> None:
    class Ours:
        def load(self, other: str) -> None: ...

    rows = [monkey_patch.MonkeyPatch(at(name), "", "", "", "") for name in ("Base.save", "Base")]
    for row, ours in zip(rows, (lambda self, more: None, Ours), strict=True):
        monkey_patch.patch(row, ours)
    probe = api_probes.has_methods(at("Base"), {"load": ("request",), "save": ()})
    problem = probe(api_probes.INSTALLED)
    for row in reversed(rows):
        monkey_patch.restore(row)
    assert problem == ""
