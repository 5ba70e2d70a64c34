"""Parts of ``benchmarks/nixl_connector.py``."""
