"""The native ring, which several capabilities need and a build without a C compiler lacks."""

import contextlib
from collections.abc import Iterator

from vllm_commext.errors import UnsupportedError


@contextlib.contextmanager
def needing_the_extension() -> Iterator[None]:
    """Turn an ImportError inside into an UnsupportedError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"the native extension vllm_commext.shm._shm_ring cannot be imported ({error}); "
            "install a wheel of vllm-commext, or build it with a C compiler at hand"
        ) from error
