"""Servers under faults, and garbage: `python -m tests.chaos`, `python -m tests.chaos.fuzzing`."""
