"""The one helper that monkey-patches a name."""

import sys
import types
from collections.abc import Callable
from functools import partial

import pytest

from vllm_commext import ConfigError, UnsupportedError
from vllm_commext.compat.monkey_patch import accepts, is_patched, original_of, patch, restore, wrap

MODULE = "commext_patch_example"
NAMES = ("value", "function", "Child.static", "Child.inherited", "gone", "Child.gone", "Gone.x")
VALUE, FUNCTION, STATIC, INHERITED, *NOT_THERE = (f"{MODULE}:{name}" for name in NAMES)


class Parent:
    def inherited(self) -> str:
        return "parent"


class Child(Parent):
    @staticmethod
    def static() -> str:
        return "original"


def stock(self: object, first: int, second: int = 0, *, third: int = 0) -> None: ...


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType(MODULE)
    child = type("Child", (Parent,), dict(vars(Child)))
    vars(made).update(value=None, function=len, Child=child, stock=stock)
    monkeypatch.setitem(sys.modules, MODULE, made)
    symbols = {VALUE, FUNCTION, STATIC, INHERITED, *NOT_THERE, f"{MODULE}:stock"}
    monkeypatch.setattr("vllm_commext.compat.monkey_patch.SYMBOLS", symbols)
    return made


@pytest.mark.parametrize("symbol", [VALUE, FUNCTION, STATIC, INHERITED])
def test_a_name_is_replaced_and_restored_as_it_was(module: types.ModuleType, symbol: str) -> None:
    owner, name = (module, symbol) if "." not in symbol else (module.Child, symbol)
    before, found = dict(vars(owner)), original_of(symbol)
    replacement = staticmethod(lambda: "ours")
    patch({symbol: replacement})
    assert vars(owner)[name.rpartition(":")[2].rpartition(".")[2]] is replacement
    assert is_patched(symbol)
    assert original_of(symbol) == found
    with pytest.raises(UnsupportedError, match="patched already"):
        patch({symbol: 2})
    restore(symbol)
    assert not is_patched(symbol)
    assert dict(vars(owner)) == before
    assert module.Child().inherited() == "parent"
    with pytest.raises(UnsupportedError, match="nothing to restore"):
        restore(symbol)


@pytest.mark.parametrize("symbol", NOT_THERE)
def test_a_name_that_is_not_there_is_refused(symbol: str) -> None:
    with pytest.raises(UnsupportedError, match="has renamed it"):
        patch({symbol: 1})


def test_nothing_is_restored_over_somebody_else(module: types.ModuleType) -> None:
    patch({VALUE: 1})
    vars(module)["value"] = "theirs"
    with pytest.raises(UnsupportedError, match="somebody else"):
        restore(VALUE)
    assert module.value == "theirs"


def test_several_names_are_replaced_or_none(module: types.ModuleType) -> None:
    before, three = module.Child.static, (VALUE, FUNCTION, STATIC)
    with pytest.raises(UnsupportedError, match="gone"):
        patch(dict.fromkeys((*three, NOT_THERE[0]), len))
    assert (module.value, module.Child.static) == (None, before)
    assert not any(map(is_patched, three))
    patch(dict.fromkeys(three, max))
    assert module.value is module.function is module.Child.static is max
    restore(VALUE)
    assert is_patched(FUNCTION)
    restore(FUNCTION, STATIC)
    assert (module.value, module.function, module.Child.static) == (None, len, before)


def test_a_wrapper_gets_what_was_there_and_is_put_there_once(module: types.ModuleType) -> None:
    for _ in range(2):
        wrap({FUNCTION: lambda original: partial(original, "four")})
    assert module.function() == 4


def test_only_what_is_in_the_inventory_is_patched() -> None:
    with pytest.raises(ConfigError, match="expected symbols of the inventory"):
        patch({f"{MODULE}:other": 1})


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
    ours: Callable[..., None], is_taken: bool
) -> None:
    assert accepts(ours, stock) == is_taken
    if is_taken:
        patch({f"{MODULE}:stock": ours})
        return
    with pytest.raises(UnsupportedError, match=r"stock takes \(self: object, first: int, second"):
        patch({f"{MODULE}:stock": ours})
    assert not is_patched(f"{MODULE}:stock")
