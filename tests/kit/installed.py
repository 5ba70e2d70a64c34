"""The installed vLLM's version, without importing vLLM."""

from importlib.metadata import version

from packaging.version import Version


def release(told: str) -> Version:
    """The release that a version is a build of: ``0.33.0+cpu`` is one of 0.33.0."""
    return Version(Version(told).public)


VLLM = release(version("vllm"))
