"""The contract layer: an installed vLLM, no model. Without vLLM there is nothing to collect."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Tests are no package: here lies what several of them share.
    sys.path.insert(0, str(Path(__file__).parent))
