"""Parts of ``benchmarks/nixl.py``."""
