"""The command ``vllm-commext``; no module of it needs vLLM to be imported."""
