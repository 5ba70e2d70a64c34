"""Prefill and decode servers on this machine, proven equal to one server."""
