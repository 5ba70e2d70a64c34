"""The installed vLLM's version, without importing vLLM."""

from importlib.metadata import version

from packaging.version import Version

VLLM = Version(version("vllm").partition("+")[0])
