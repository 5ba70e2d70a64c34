"""The tests, as packages: what several of them share is imported by its whole name."""
