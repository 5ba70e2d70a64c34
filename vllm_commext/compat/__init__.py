"""The only place that knows vLLM's versions, probes what it relies on, or rebinds a name of it."""
