"""The places where this package enters something into vLLM, or acts on a module that is imported;
all may be entered repeatedly."""

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from vllm_commext.errors import UnsupportedError
from vllm_commext.settings import Toggle

logger = logging.getLogger("vllm.commext.plugin")


def vllm_version() -> str:
    """``vllm.__version__``.

    Raises:
        UnsupportedError: vLLM is not installed, or its import fails.
    """
    try:
        import vllm
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
        why = "is not installed" if missing else f"cannot be imported ({error})"
        raise UnsupportedError(f"vLLM {why}") from error
    return vllm.__version__


def add_toggles(toggles: Iterable[Toggle]) -> None:
    """Make the toggles known to vLLM.

    vLLM warns about ``VLLM_`` names that it does not know, or stops if told to be strict, and takes
    every name that it knows into its compile-cache key. Ray's actors get them too."""
    from vllm import envs

    for toggle in toggles:
        getter = partial(os.environ.get, toggle.name, toggle.default)
        envs.environment_variables.setdefault(toggle.name, getter)


def add_factor(name: str, value: Callable[[], str]) -> None:
    """Let vLLM's compile-cache key depend on a value, asked for whenever a key is made."""
    from vllm import envs

    envs.environment_variables[name] = value


def add_connector(name: str, module: str, own: str) -> None:
    """Let `name` stand for the KV connector `own` of `module` from now on, also a name of vLLM's;
    the class is imported when it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM has no public way to ask, and a second registration raises.
    KVConnectorFactory._registry.pop(name, None)  # pyright: ignore[reportPrivateUsage]
    KVConnectorFactory.register_connector(name, module, own)


Action = Callable[[], None]
_actions: dict[str, Action] = {}


def _act(name: str) -> None:
    action = _actions.pop(name, None)
    if action is None:
        return
    try:
        action()
    except Exception as error:  # noqa: BLE001 - it must not become the import's own failure
        logger.warning("commext: %s not patched: %s: %s", name, type(error).__name__, error)


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

    vLLM's models are imported when one is loaded, which costs seconds that a process without that
    model need not spend. What the action raises is logged and goes no further."""
    _actions[name] = action
    if name in sys.modules:
        _act(name)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
