"""Puts the repository's root on the import path: benchmarks share ``tests.kit`` with the tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
