"""Parts of ``tools/seam_matrix.py``."""
