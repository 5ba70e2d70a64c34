"""Acts on a module right after it has been imported, and does not import it before its time.

The models of vLLM are imported when one is loaded, which costs seconds that a process without that
model need not spend.
"""

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger("vllm.commext.plugin")

Action = Callable[[], None]
_actions: dict[str, Action] = {}


def _act(name: str) -> None:
    action = _actions.pop(name, None)
    if action is None:
        return
    try:
        action()
    except Exception as error:  # noqa: BLE001 - it must not become the import's own failure
        logger.warning("commext: %s stays as it is: %s: %s", name, type(error).__name__, error)


class _Loader(importlib.abc.Loader):
    """Loads as the module's own loader does, which it leaves in its place, and then acts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        _act(module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _actions:
            return None
        others = (each for each in sys.meta_path if each is not self)
        for finder in others:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_finder = _Finder()


def when_imported(name: str, action: Action) -> None:
    """Let `action` run once, when the module of that name has been imported, or now if it has.

    What the action raises is logged and goes no further.
    """
    _actions[name] = action
    if name in sys.modules:
        _act(name)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
