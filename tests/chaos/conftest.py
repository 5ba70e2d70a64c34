"""Where the parts of the suite are found, and what its tests need."""

import importlib.util
import sys
from pathlib import Path

import pytest

# Tests are no package: the parts lie beside them.
sys.path.insert(0, str(Path(__file__).parent))

NEEDED = ("vllm", "nixl", "httpx", "aiohttp")


@pytest.fixture(scope="session")
def real_servers(forked_servers: None) -> None:
    """Skip where real servers cannot run."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
