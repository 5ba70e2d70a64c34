"""Parts of ``tools/api_matrix.py``."""
