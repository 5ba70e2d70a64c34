"""Acting on a module right after its import, with modules that are only written down here."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_commext.compat import hooks

NAME = "commext_imports_probe"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that can be imported, and is not yet."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(NAME, None)
    hooks._actions.pop(NAME, None)


def value() -> int:
    return importlib.import_module(NAME).value


@pytest.mark.usefixtures("module")
def test_the_action_comes_right_after_the_import_and_not_before() -> None:
    done: list[int] = []
    hooks.when_imported(NAME, lambda: done.append(sys.modules[NAME].value))
    assert done == []
    assert NAME not in sys.modules
    assert value() == 1
    assert done == [1]
    importlib.reload(sys.modules[NAME])
    assert done == [1]


@pytest.mark.usefixtures("module")
def test_a_module_that_is_there_already_is_acted_on_at_once() -> None:
    done: list[int] = []
    value()
    hooks.when_imported(NAME, lambda: done.append(1))
    assert done == [1]


@pytest.mark.usefixtures("module")
def test_the_module_has_its_own_loader_and_source() -> None:
    hooks.when_imported(NAME, lambda: None)
    value()
    found = sys.modules[NAME]
    assert type(found.__loader__).__name__ == "SourceFileLoader"
    assert found.__spec__.loader is found.__loader__


@pytest.mark.usefixtures("module")
def test_what_the_action_raises_does_not_become_the_imports_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.commext")

    def fail() -> None:
        raise KeyError("gone")

    hooks.when_imported(NAME, fail)
    assert value() == 1
    assert f"{NAME} not patched: KeyError" in caplog.text


def test_a_module_whose_import_fails_is_not_acted_on(module: Path) -> None:
    done: list[int] = []
    module.write_text("raise ImportError('no such library')\n")
    hooks.when_imported(NAME, lambda: done.append(1))
    with pytest.raises(ImportError, match="no such library"):
        value()
    assert done == []


def test_a_workers_side_of_the_connector_loads_without_vllm() -> None:
    modules = "vllm_commext.nixl.prefill.side_channel, vllm_commext.nixl.transfer_thread"
    code = f"import sys, {modules}; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
