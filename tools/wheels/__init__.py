"""Parts of ``tools/make_wheels.py``."""
