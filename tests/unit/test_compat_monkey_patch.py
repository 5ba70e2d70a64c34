"""The one helper that monkey-patches a name."""

import sys
import types
from collections.abc import Callable

import pytest

from vllm_commext import ConfigError, UnsupportedError
from vllm_commext.compat.monkey_patch import (
    MonkeyPatch,
    accepts,
    is_patched,
    original_of,
    patch,
    patch_all,
    restore,
)

MODULE = "commext_patch_example"


def row(name: str) -> MonkeyPatch:
    return MonkeyPatch(f"{MODULE}:{name}", "why", "guard", "test", "removal")


class Parent:
    def inherited(self) -> str:
        return "parent"


class Child(Parent):
    @staticmethod
    def static() -> str:
        return "original"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType(MODULE)
    child = type("Child", (Parent,), dict(vars(Child)))
    vars(made).update(value=None, function=len, Child=child)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


@pytest.mark.parametrize("name", ["value", "function"])
def test_a_module_global_is_replaced_and_restored(module: types.ModuleType, name: str) -> None:
    before = dict(vars(module))
    replacement = object()
    patch(row(name), replacement)
    assert vars(module)[name] is replacement
    assert is_patched(row(name))
    restore(row(name))
    assert not is_patched(row(name))
    assert dict(vars(module)) == before


def test_a_descriptor_of_a_class_comes_back_as_it_was(module: types.ModuleType) -> None:
    before = vars(module.Child)["static"]
    patch(row("Child.static"), staticmethod(lambda: "ours"))
    assert module.Child.static() == "ours"
    restore(row("Child.static"))
    assert vars(module.Child)["static"] is before
    assert module.Child.static() == "original"


def test_an_inherited_method_is_inherited_again(module: types.ModuleType) -> None:
    patch(row("Child.inherited"), lambda self: "ours")
    assert module.Child().inherited() == "ours"
    assert Parent().inherited() == "parent"
    restore(row("Child.inherited"))
    assert "inherited" not in vars(module.Child)
    assert module.Child().inherited() == "parent"


def test_a_second_patch_is_refused_and_changes_nothing(module: types.ModuleType) -> None:
    patch(row("value"), 1)
    with pytest.raises(UnsupportedError, match="patched already"):
        patch(row("value"), 2)
    assert module.value == 1
    restore(row("value"))
    assert module.value is None


def test_a_name_that_is_not_there_is_refused(module: types.ModuleType) -> None:
    for name in ("gone", "Child.gone", "Gone.static"):
        with pytest.raises(UnsupportedError, match="has renamed it"):
            patch(row(name), 1)
    assert "gone" not in vars(module)


def test_nothing_is_restored_over_somebody_else(module: types.ModuleType) -> None:
    patch(row("value"), 1)
    module.value = "theirs"
    with pytest.raises(UnsupportedError, match="somebody else"):
        restore(row("value"))
    assert module.value == "theirs"


@pytest.mark.usefixtures("module")
def test_restoring_what_is_not_patched_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="nothing to restore"):
        restore(row("value"))


@pytest.mark.parametrize("symbol", ["", "module", ":name", "module:"])
def test_a_malformed_symbol_is_refused(symbol: str) -> None:
    with pytest.raises(ConfigError, match="expected a symbol"):
        patch(MonkeyPatch(symbol, "", "", "", ""), 1)


def test_several_names_are_replaced_or_none(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tuple(row(name) for name in ("value", "function", "Child.static", "gone"))
    monkeypatch.setattr("vllm_commext.compat.monkey_patch.INVENTORY", rows)
    before = module.Child.static
    with pytest.raises(UnsupportedError, match="gone"):
        patch_all({one.symbol: len for one in rows})
    assert (module.value, module.Child.static) == (None, before)
    assert not any(is_patched(one) for one in rows[:3])
    patch_all({one.symbol: max for one in rows[:3]})
    assert module.value is module.function is module.Child.static is max
    restore(rows[0])
    assert is_patched(rows[1])
    restore(rows[1])
    restore(rows[2])
    assert (module.value, module.function, module.Child.static) == (None, len, before)


def test_only_what_is_in_the_inventory_is_patched(module: types.ModuleType) -> None:
    with pytest.raises(ConfigError, match="expected a symbol of the inventory"):
        patch_all({f"{MODULE}:value": 1})
    assert module.value is None


def test_what_was_at_a_name_is_found_behind_what_is_there(module: types.ModuleType) -> None:
    names = ("value", "function", "Child.static", "Child.inherited")
    before = [original_of(f"{MODULE}:{name}") for name in names]
    for name in names:
        patch(row(name), lambda: "ours")
    assert [original_of(f"{MODULE}:{name}") for name in names] == before
    assert before[:2] == [None, len]
    assert before[2]() == "original"
    assert before[3] is Parent.inherited


def stock(self: object, first: int, second: int = 0, *, third: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("ours", "is_taken"),
    [
        (lambda core, first, second=1, *, third=2: None, True),
        (lambda self, *args, **kwargs: None, True),
        (lambda self, first, second, third, fourth=0: None, True),
        (lambda self, first, second=0: None, False),
        (lambda self, second, other=0, third=0: None, False),
    ],
)
def test_a_replacement_takes_what_vllms_function_takes_or_is_refused(
    module: types.ModuleType, ours: Callable[..., None], is_taken: bool
) -> None:
    module.__dict__["stock"] = stock
    assert accepts(ours, stock) == is_taken
    if is_taken:
        patch(row("stock"), ours)
        return
    with pytest.raises(UnsupportedError, match=r"stock takes \(self: object, first: int, second"):
        patch(row("stock"), ours)
    assert not is_patched(row("stock"))
