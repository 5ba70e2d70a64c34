"""The contract layer: an installed vLLM, no model. Without vLLM there is nothing to collect."""

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
