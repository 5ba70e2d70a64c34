"""The only place that knows vLLM's versions, probes what it relies on, or patches a name of it."""
