"""Fixtures of the unit layer, and where its tests find the modules of ``tools/``."""

import sys
from pathlib import Path

import pytest

from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import nvrtc

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))


@pytest.fixture
def needs_nvrtc() -> None:
    """Skips with the reason where no kernel can be compiled."""
    try:
        nvrtc.nvrtc_version()
    except UnsupportedError as error:
        pytest.skip(str(error))
