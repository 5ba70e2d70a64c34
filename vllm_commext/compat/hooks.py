"""The places where this package enters something into vLLM; all may be entered repeatedly."""

import os
from collections.abc import Callable, Iterable

from vllm_commext.errors import UnsupportedError
from vllm_commext.settings import Toggle


def vllm_version() -> str:
    """``vllm.__version__``.

    Raises:
        UnsupportedError: vLLM is not installed, or its import fails.
    """
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise UnsupportedError("vLLM is not installed") from error
        raise UnsupportedError(f"vLLM cannot be imported ({error})") from error
    except ImportError as error:
        raise UnsupportedError(f"vLLM cannot be imported ({error})") from error
    return vllm.__version__


def _getter(toggle: Toggle) -> Callable[[], str]:
    return lambda: os.environ.get(toggle.name, toggle.default)


def add_toggles(toggles: Iterable[Toggle]) -> None:
    """Make the toggles known to vLLM.

    vLLM warns about ``VLLM_`` names that it does not know, or stops if told to be strict, and
    takes every name that it knows into its compile-cache key. Ray's actors get them too.
    """
    from vllm import envs

    for toggle in toggles:
        envs.environment_variables.setdefault(toggle.name, _getter(toggle))


def add_factor(name: str, value: Callable[[], str]) -> None:
    """Let vLLM's compile-cache key depend on a value, asked for whenever a key is made."""
    from vllm import envs

    envs.environment_variables[name] = value


def add_connector(name: str, module: str) -> None:
    """Register the class `name` of `module` as a KV connector; it is imported when it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM has no public way to ask, and a second registration raises.
    if name not in KVConnectorFactory._registry:  # pyright: ignore[reportPrivateUsage]
        KVConnectorFactory.register_connector(name, module, name)
