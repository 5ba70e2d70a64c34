"""The dispatcher and its backends speak of tensors; the arithmetic needs no torch."""

import importlib.util
import sys
from pathlib import Path

EMULATION = "allreduce_push_emulation"

if importlib.util.find_spec("torch") is None:
    collect_ignore = [
        *("test_dispatcher.py", "test_flashinfer.py", "test_push_on_cpu.py"),
        *("test_ranks.py", "ranks.py"),
    ]
elif EMULATION not in sys.modules:
    path = Path(__file__).with_name("push_emulation.py")
    spec = importlib.util.spec_from_file_location(EMULATION, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[EMULATION] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[EMULATION])
