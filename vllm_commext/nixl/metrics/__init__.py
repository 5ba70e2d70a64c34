"""What is counted and timed, and how vLLM and Prometheus get it."""
