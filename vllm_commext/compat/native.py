"""What `auto` is proven on; and the native ring, which several capabilities need and a build
without a C compiler lacks."""

import contextlib
import importlib
import platform
from collections.abc import Iterator

from vllm_commext.compat import evidence, hooks
from vllm_commext.compat.versions import is_in_window
from vllm_commext.errors import UnprovenHereError, UnsupportedError

RING = "vllm_commext.shm._shm_ring"
PROVEN_MACHINES = ("x86_64", "aarch64")


@contextlib.contextmanager
def needing_the_extension() -> Iterator[None]:
    """Turn an ImportError inside into an UnsupportedError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"the native extension {RING} cannot be imported ({error}); "
            "install a wheel of vllm-commext, or build it with a C compiler at hand"
        ) from error


def require_proven_machine(capability: str) -> None:
    """What the native ring's capabilities are proven on, and `auto` therefore means for them: a
    vLLM for CPUs, on a processor that the ring is tested on, with its extension built.

    Raises:
        UnprovenHereError: with what it is that differs here.
    """
    del capability
    machine = platform.machine()
    if machine not in PROVEN_MACHINES:
        raise UnprovenHereError(f"proven on {', '.join(PROVEN_MACHINES)}, and this is {machine}")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise UnprovenHereError(
            f"proven with vLLM for CPUs, and this is for {current_platform.device_name}"
        )
    try:
        importlib.import_module(RING)
    except ImportError as error:
        raise UnprovenHereError(f"the native extension is not built ({error})") from error


def require_proven_gpus(capability: str) -> None:
    """What the kernels are proven on, and `auto` therefore means for them: NVIDIA GPUs, and no vLLM
    of which we know that it differs from those on which the GPU tests are run. What more it takes
    is seen when a group of ranks is made.

    Raises:
        UnprovenHereError: with what it is that differs here.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise UnprovenHereError(
            f"proven on NVIDIA GPUs, and this vLLM is for {current_platform.device_name}"
        )
    version = hooks.vllm_version()
    found = evidence.evidence_for(capability, on_gpus=True)
    if found.verdict is evidence.Verdict.DIFFERS and is_in_window(version):
        raise UnprovenHereError(f"the GPU tests are not run on vLLM {version}: {found.reason}")
