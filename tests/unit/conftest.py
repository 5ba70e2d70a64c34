"""Fixtures of the unit layer; tests of it may be coroutines."""

import asyncio
import inspect
from pathlib import Path

import pytest

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import launch


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def needs_nvrtc() -> None:
    try:
        launch.nvrtc_version()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
