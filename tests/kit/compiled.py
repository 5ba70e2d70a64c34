"""``python -m tests.kit.compiled``: compile what servers import, before several start."""

import importlib
import os

if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    for name in ("vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)
