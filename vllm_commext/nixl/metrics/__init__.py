"""Counters and timings, for vLLM's log and Prometheus."""
