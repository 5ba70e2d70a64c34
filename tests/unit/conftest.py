"""Fixtures of the unit layer."""

import pytest

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import nvrtc


@pytest.fixture
def needs_nvrtc() -> None:
    """Skips with the reason where no kernel can be compiled."""
    try:
        nvrtc.nvrtc_version()
    except UnsupportedError as error:
        pytest.skip(str(error))
