"""`vllm-commext serve`: engines on this host and the proxy in front of them, as one command."""
