"""What tests of several folders share, and no user needs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORRUPTING = "CorruptingNixlConnector"
CORRUPTING_MODULE = "tests.kit.corrupting_connector"
"""Damages what a decode engine has read; the server needs ``ROOT`` as its ``PYTHONPATH``."""
