"""`make matrix`: API checks of a text, against a small package that is only written here."""

import json
import textwrap
from pathlib import Path

import pytest
from matrix import columns
from matrix.source_view import SourceView

from vllm_commext.compat import api_probes as probes
from vllm_commext.compat.api_probes import Probe, guarded

BASE = """
    import abc, enum, functools
    from dataclasses import dataclass, field
    from typing import ClassVar

    class Role(enum.Enum):
        READER = 0

    class Root(abc.ABC):
        @abc.abstractmethod
        def save(self, layer, *, attn=None, **kwargs): ...
        @classmethod
        def build(cls, data: dict[str, int] = {}) -> str: return ""

    @dataclass(frozen=True)
    class Spec:
        shape: tuple[int, ...]
        count: int = 1
        shared: ClassVar[int] = 2
        names: list[str] = field(default_factory=list)

    @functools.lru_cache
    def layout(): ...

    try:
        import not_installed
        table = {"a": lambda: 1, "b": len}
    except ImportError:
        table = {}
    wrong = {"a": 1}
"""
PART = """
    from ..base import Root as Above, Role
    from .. import base
    from not_installed import thing

    class Leaf(Above, thing.Mixin):
        def __init__(self, config, role: "Role" = base.Role.READER): ...

    registry = Leaf(1)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {"base.py": BASE, "sub/__init__.py": "from .part import Leaf\n", "sub/part.py": PART}
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


HOLD: dict[str, Probe] = {
    "signature": probes.takes("vllm.base:Root.save", "layer"),
    "class method": probes.takes("vllm.base:Root.build", "data"),
    "constructor": probes.takes("vllm.sub.part:Leaf.__init__", "config", "role"),
    "through a package": probes.takes("vllm.sub:Leaf.__init__", "config"),
    "inherited through an import": probes.has_methods("vllm.sub:Leaf", {"save": ("layer",)}),
    "of an instance": probes.takes("vllm.sub.part:registry.save", "layer"),
    "abstract": probes.abstract_only("vllm.sub:Leaf", {"save": ("layer",)}),
    "fields": probes.has_fields("vllm.base:Spec", "shape", "count", "names"),
    "member and cache": probes.exists("vllm.base:Role.READER", "vllm.base:layout.cache_clear"),
    "table in a try": probes.maps_to_callables("vllm.base:table"),
}
BREAK: dict[str, tuple[Probe, str]] = {
    "no module": (probes.exists("vllm.gone:x"), "No module named 'vllm.gone'"),
    "no name": (probes.exists("vllm.base:gone"), "has no attribute 'gone'"),
    "no method": (probes.exists("vllm.sub:Leaf.gone"), "has no attribute 'gone'"),
    "argument": (probes.takes("vllm.base:Root.save", "name"), "found (layer, attn, kwargs)"),
    "needed": (probes.takes("vllm.sub:Leaf.__init__"), "found (config, role)"),
    "abstract": (probes.abstract_only("vllm.sub:Leaf", {}), "beyond ours, found save"),
    "class variable": (probes.has_fields("vllm.base:Spec", "shared"), "expected fields shared"),
    "no callable": (probes.maps_to_callables("vllm.base:wrong"), "a is none"),
    "not cached": (probes.exists("vllm.base:Root.build.cache_clear"), "cache_clear"),
}


@pytest.mark.parametrize("name", HOLD)
def test_a_probe_holds_on_text(root: Path, name: str) -> None:
    assert guarded(HOLD[name], SourceView(root)) == ""


@pytest.mark.parametrize("name", BREAK)
def test_a_probe_says_of_text_what_has_moved(root: Path, name: str) -> None:
    probe, expected = BREAK[name]
    view = SourceView(root)
    assert expected in guarded(probe, view)
    assert guarded(probe, view) == guarded(probe, view)  # a failed look-up leaves nothing behind


def test_another_vllm_is_looked_at_without_installing_it(root: Path) -> None:
    metadata = root / "vllm-0.99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.99.0+cu130\n")
    found = columns.from_text(root)
    assert (found.version, found.how) == ("0.99.0", "text")
    assert found.cells["register_connector"] == "MOVED"
    assert "No module named" in found.problems["register_connector"]
    assert list(found.cells) == columns.row_names()
    table = columns.table([found])
    assert table.splitlines()[0] == "|  | 0.99.0 (text) |"
    assert len(table.splitlines()) == 2 + len(found.cells)
    assert any(line.startswith("0.99.0: register_connector: ") for line in columns.moved([found]))


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(columns.MatrixError, match="as an unzipped wheel does"):
        columns.from_text(tmp_path)


def test_a_column_of_another_python_comes_as_json(tmp_path: Path) -> None:
    python = tmp_path / "python"
    column = {"version": "0.30.0", "how": "imported", "cells": {"x": "holds"}, "problems": {}}
    python.write_text(f"#!/bin/sh\necho a log line\necho '{json.dumps(column)}'\n")
    python.chmod(0o755)
    assert columns.from_environment(python) == columns.Column(**column)
    python.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    with pytest.raises(columns.MatrixError, match=r"ended with 3: it broke"):
        columns.from_environment(python)
