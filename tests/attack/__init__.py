"""Attacks on real processes, each bounded in time and count, with honest requests beside them."""
