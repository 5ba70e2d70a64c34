"""What the tests of this folder need."""

import importlib.util

import pytest

NEEDED = ("vllm", "nixl", "httpx", "aiohttp")


@pytest.fixture(scope="session")
def real_servers(forked_servers: None) -> None:
    """Skip where real servers cannot run."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
